"""SAPO: a sigmoid gate on every token's ratio instead of a hard clip."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from rlzoo import ClipInputs, ClipPolicy, ClipResult, hookimpl, ops


class SAPO(ClipPolicy):
    """Reduces a token's gradient smoothly as its ratio moves away from 1, and faster if the advantage is negative.

    Formula:
        J = mean over responses of mean_t (4 / tau) sigmoid(tau (r_t - 1)) A
        tau = tau_positive where A > 0, tau_negative where A <= 0

    Where:
        r_t = pi_t / pi_old_t, and A = (R - mean) / std, with the mean and std of the rewards R in the group. The weight of a
        token's gradient is r_t sech^2(tau (r_t - 1) / 2), which is 1 at ratio 1.

    Differences from GRPO:
        The gradient decreases smoothly and is never cut, so nothing counts as clipped. It decreases on both sides of 1, for
        either sign of the advantage.

    Reference:
        Soft Adaptive Policy Optimization, arXiv 2511.20347, with taus of 1.0 and 1.05 as in the paper.
    """

    name = "sapo"
    paper = "arXiv 2511.20347"
    scope = "token"
    watch: ClassVar = {
        "fairness/ess": "the share of responses that carry the gradient",
        "ratio/log_ratio_max": "a token's weight is largest at a ratio of 2, and below 0.02 at ratios above 9",
    }
    exempt: ClassVar = {"clipped_means_no_gradient": "the gradient decreases and is never cut"}

    tau_positive: float = Field(1.0, gt=0, le=100, description="steepness of the gate where A > 0")
    tau_negative: float = Field(1.05, gt=0, le=100, description="steepness of the gate where A < 0")

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Gate each token and return a ``(B, T)`` objective."""
        log_ratio, advantages = ops.log_ratio(inputs), inputs.advantages.detach().float()
        tau = torch.where(advantages > 0, self.tau_positive, self.tau_negative)
        far = tau * (ops.limited_exp(log_ratio) - 1)
        gate = torch.where(
            far > 0, 1 - torch.sigmoid(-far), torch.sigmoid(far)
        )  # both forms equal sigmoid(far), but the second rounds to 1 where far > 17
        objective = advantages * 4 / tau * gate
        return ClipResult(objective, log_ratio.detach(), torch.zeros_like(log_ratio, dtype=torch.bool))


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """Return the rules of this plugin."""
    return [SAPO]
