"""VESPO: weights each response by a smooth function of its importance ratio, which vanishes far from 1 on both sides."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from rlzoo import ClipInputs, ClipPolicy, ClipResult, Reduction, hookimpl, ops


class VESPO(ClipPolicy):
    """Weights a response's gradient by a gamma-shaped function of its importance ratio, which is steeper where A < 0.

    Formula:
        J = mean over the step's tokens of sg[phi(w)] A log pi_t,   phi(w) = w^k exp(lambda (1 - w)),   w = exp(S)

    Where:
        S = sum_t log(pi_t / pi_old_t). (k, lambda) are k_positive and lambda_positive where A >= 0, and k_negative and
        lambda_negative where A < 0. sg[.] stops the gradient. phi(1) = 1, and phi is largest at w = k / lambda.

    Differences from GRPO:
        There is one weight per response, computed from the product of its token ratios. The weight is smooth and never
        cut, so nothing counts as clipped. The mean is over all tokens.

    Reference:
        VESPO, arXiv 2602.10693, with (k, lambda) = (2, 3) where A >= 0 and (3, 2) where A < 0, as in the published
        implementation in TRL.
    """

    name = "vespo"
    paper = "arXiv 2602.10693"
    scope = "token"
    watch: ClassVar = {
        "fairness/ess": "the share of responses that carry the gradient",
        "ratio/sigma_token": "multiplied by sqrt(L), this is approximately the spread of S; phi becomes small if it exceeds 1",
    }
    exempt: ClassVar = {"clipped_means_no_gradient": "the weight decreases and is never cut"}

    reduction: Reduction = Field("token_mean", description="how the objective is reduced to a scalar")
    k_positive: float = Field(2.0, ge=0, le=100, description="power of the ratio where A >= 0")
    lambda_positive: float = Field(3.0, ge=0, le=100, description="rate of the decay above 1 where A >= 0")
    k_negative: float = Field(3.0, ge=0, le=100, description="power of the ratio where A < 0")
    lambda_negative: float = Field(2.0, ge=0, le=100, description="rate of the decay above 1 where A < 0")

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Weight each response's tokens. The objective is ``(B, T)``, and log-ratios and clip decisions are ``(B, 1)``."""
        advantages = inputs.advantages.detach().float()
        total = ops.sequence_sum(ops.log_ratio(inputs).detach(), inputs.response_mask)
        limited = total.clamp(-ops.LOG_RATIO_LIMIT, ops.LOG_RATIO_LIMIT)
        k = torch.where(advantages >= 0, self.k_positive, self.k_negative)
        rate = torch.where(advantages >= 0, self.lambda_positive, self.lambda_negative)
        phi = (rate + k * limited - rate * limited.exp()).exp()
        return ClipResult(phi * advantages * ops.log_probs(inputs), total, torch.zeros_like(total, dtype=torch.bool))


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """Return the rules of this plugin."""
    return [VESPO]
