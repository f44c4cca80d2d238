"""GMPO: the geometric mean of a response's token ratios, each clipped before it is pooled."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field

from rlzoo import ClipBand, ClipInputs, ClipPolicy, ClipResult, Width, hookimpl, ops


class GMPO(ClipPolicy):
    """Clips every token's log-ratio, then weighs the response by the geometric mean of what is left.

    Formula:
        J = mean over responses of A exp(mean_t clamp(log r_t)),   r_t = pi_t / pi_old_t
        clamp(x) = min(x, width_high) where A > 0, max(x, -width_low) where A < 0

    Where:
        A is the response's advantage. A clamped token has no gradient, the others of its response keep theirs.

    Differences from GRPO:
        The geometric mean of the ratios in place of the arithmetic mean, so that one outlier weighs little; and a band
        twice as wide, in log space.

    Reference:
        Geometric-Mean Policy Optimization, arXiv 2507.20673; widths 0.4 as in its section 4.
    """

    name = "gmpo"
    paper = "arXiv 2507.20673"
    scope = "sequence"
    watch: ClassVar = {
        "clip/fraction": "the share of a response's tokens that is clipped; small with bands this wide",
        "learner/entropy": "the wide band is meant to keep it up",
    }

    width_low: Annotated[float, Width()] = Field(
        0.4, gt=0, le=20, description="the log-ratio stays above -width_low where A < 0"
    )
    width_high: Annotated[float, Width()] = Field(
        0.4, gt=0, le=20, description="the log-ratio stays below width_high where A > 0"
    )

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Clamp each token's log-ratio, pool by response; objective ``(B, 1)``, log-ratio and decisions ``(B, T)``."""
        log_ratio, advantages = ops.log_ratio(inputs), inputs.advantages.detach().float()
        edges = torch.tensor([-self.width_low, self.width_high], device=log_ratio.device)
        band = ClipBand(low=edges[0], high=edges[1])
        _, clipped = ops.clamp_by_advantage(log_ratio, advantages, band)
        clamped = torch.where(clipped, torch.where(advantages > 0, band.high, band.low), log_ratio)
        pooled = ops.sequence_mean(clamped, inputs.response_mask)  # only the mean is exponentiated, and limited
        return ClipResult(ops.limited_exp(pooled) * advantages, log_ratio.detach(), clipped, band)


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """The policies of this plugin."""
    return [GMPO]
