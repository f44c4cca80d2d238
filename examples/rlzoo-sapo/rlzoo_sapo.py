"""SAPO: a sigmoid gate on every token's ratio, in place of a hard clip."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from rlzoo import ClipInputs, ClipPolicy, ClipResult, hookimpl, ops


class SAPO(ClipPolicy):
    """Lets the gradient of a token fade as its ratio leaves 1, faster where the advantage is negative.

    Formula:
        J = mean over responses of mean_t A (4 / tau) sigmoid(tau (r_t - 1)),   tau = tau_positive or tau_negative by A's sign

    Where:
        r_t = pi_t / pi_old_t. At ratio 1 the gradient is A, as it is without a gate.

    Differences from GRPO:
        No token is ever cut off, so nothing counts as clipped.

    Reference:
        Soft Adaptive Policy Optimization, arXiv 2511.20347.
    """

    name = "sapo"
    paper = "arXiv 2511.20347"
    scope = "token"
    exempt: ClassVar = {"clipped_means_no_gradient": "the gradient fades and is never cut"}

    tau_positive: float = Field(1.0, gt=0, le=100, description="steepness of the gate where A > 0")
    tau_negative: float = Field(1.05, gt=0, le=100, description="steepness of the gate where A < 0")

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Gate each token; shapes as in `ClipInputs`, objective ``(B, T)``."""
        log_ratio = ops.log_ratio(inputs)
        advantages = inputs.advantages.detach().float()
        ratio = log_ratio.clamp(-ops.LOG_RATIO_LIMIT, ops.LOG_RATIO_LIMIT).exp()
        tau = torch.where(advantages > 0, self.tau_positive, self.tau_negative)
        objective = advantages * 4 / tau * torch.sigmoid(tau * (ratio - 1))
        return ClipResult(objective, log_ratio.detach(), torch.zeros_like(log_ratio, dtype=torch.bool))


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """The policies of this plugin."""
    return [SAPO]
