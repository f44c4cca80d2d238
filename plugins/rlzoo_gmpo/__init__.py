"""GMPO: weights each response by the geometric mean of its clipped token ratios."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field

from rlzoo import ClipBand, ClipInputs, ClipPolicy, ClipResult, Width, hookimpl, ops


class GMPO(ClipPolicy):
    """Clips every token's log-ratio, then weights the response by the geometric mean of the clipped ratios.

    Formula:
        J = mean over responses of A exp(mean_t clamp(log r_t)),   r_t = pi_t / pi_old_t
        clamp(x) = min(x, width_high) where A > 0, max(x, -width_low) where A < 0

    Where:
        A is the response's advantage. A clamped token has no gradient, but the other tokens of its response keep theirs.

    Differences from GRPO:
        The mean of the ratios is geometric instead of arithmetic, so that individual outliers have little weight. The band
        is twice as wide in log space.

    Reference:
        Geometric-Mean Policy Optimization, arXiv 2507.20673, with widths of 0.4 as in its section 4.
    """

    name = "gmpo"
    paper = "arXiv 2507.20673"
    scope = "sequence"
    watch: ClassVar = {
        "clip/fraction": "the share of clipped tokens, which is small with bands this wide",
        "learner/entropy": "the wide band should keep it high",
    }

    width_low: Annotated[float, Width()] = Field(
        0.4, gt=0, le=20, description="the log-ratio stays above -width_low where A < 0"
    )
    width_high: Annotated[float, Width()] = Field(
        0.4, gt=0, le=20, description="the log-ratio stays below width_high where A > 0"
    )

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Clamp and pool the log-ratios. The objective is ``(B, 1)``, and log-ratios and clip decisions are ``(B, T)``."""
        log_ratio, advantages = ops.log_ratio(inputs), inputs.advantages.detach().float()
        edges = torch.tensor([-self.width_low, self.width_high], device=log_ratio.device)
        band = ClipBand(low=edges[0], high=edges[1])
        _, clipped = ops.clamp_by_advantage(log_ratio, advantages, band)
        clamped = torch.where(clipped, torch.where(advantages > 0, band.high, band.low), log_ratio)
        pooled = ops.sequence_mean(clamped, inputs.response_mask)  # only the mean is limited and exponentiated
        return ClipResult(ops.limited_exp(pooled) * advantages, log_ratio.detach(), clipped, band)


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """Return the rules of this plugin."""
    return [GMPO]
