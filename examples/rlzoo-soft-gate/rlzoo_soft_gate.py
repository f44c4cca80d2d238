"""A soft gate on every token's ratio instead of a hard clip."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from rlzoo import ClipInputs, ClipPolicy, ClipResult, hookimpl, ops


class SoftGate(ClipPolicy):
    """Reduces a token's gradient smoothly as its ratio moves away from 1.

    Formula:
        J = mean over responses of mean_t A arctan(tau (r_t - 1)) / tau

    Where:
        r_t = pi_t / pi_old_t. The gradient is A at ratio 1, and r_t A / (1 + tau^2 (r_t - 1)^2) elsewhere.

    Differences from GRPO:
        The gradient of a token never drops to 0, so nothing counts as clipped.

    Reference:
        An example plugin. The bundled rule `sapo` (arXiv 2511.20347) has a separate gate for each sign of the advantage.
    """

    name = "soft-gate"
    paper = "none"
    scope = "token"
    watch: ClassVar = {"fairness/ess": "how many responses carry the gradient"}
    exempt: ClassVar = {"clipped_means_no_gradient": "the gradient fades and is never cut"}

    tau: float = Field(1.0, gt=0, le=100, description="steepness of the gate")

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Gate each token and return a ``(B, T)`` objective."""
        log_ratio, advantages = ops.log_ratio(inputs), inputs.advantages.detach().float()
        objective = advantages * torch.atan(self.tau * (ops.limited_exp(log_ratio) - 1)) / self.tau
        return ClipResult(objective, log_ratio.detach(), torch.zeros_like(log_ratio, dtype=torch.bool))


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """Return the rules of this plugin."""
    return [SoftGate]
