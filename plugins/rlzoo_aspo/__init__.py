"""ASPO: the ratio of a good token turned upside down, so that tokens that fell behind weigh more."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field

from rlzoo import ClipInputs, ClipPolicy, ClipResult, Reduction, Width, hookimpl, ops


class ASPO(ClipPolicy):
    """Weighs a good token by one over its ratio and a bad one by its ratio, within GRPO's band and below a cap.

    Formula:
        J = mean over the step's tokens of sg[w_t] A pi_t / sg[pi_t],   r_t = pi_t / pi_old_t
        w_t = min(1 / r_t, cap) where A > 0, min(r_t, cap) where A < 0
        no gradient where A > 0 and r_t > 1 + clip_high, or A < 0 and r_t < 1 - clip_low: a constant of the edge's weight

    Where:
        sg[.] is a constant for the gradient; A = (R - mean) / std of the rewards R in the group. A capped token keeps its
        gradient and does not count as clipped.

    Differences from GRPO:
        GRPO weighs a good token by its ratio, so those that are already likelier learn fastest. Here those that fell behind
        do. The cap bounds a bad token's weight as well. Mean over all tokens.

    Reference:
        Asymmetric Importance Sampling Policy Optimization, arXiv 2510.06062, equation 3: clips 0.2. It does not print the
        cap; 3 is the released code's. The released code also makes the clips depend on the token's entropy: 0.2 for most
        tokens, 0.4 for the fifth of highest entropy.
    """

    name = "aspo"
    paper = "arXiv 2510.06062"
    scope = "token"
    watch: ClassVar = {
        "clip/fraction": "the share of tokens beyond the band, as in grpo",
        "ratio/log_ratio_min": "below -log(cap), good tokens are capped",
    }

    reduction: Reduction = Field("token_mean", description="how the objective becomes a scalar")
    clip_low: Annotated[float, Width()] = Field(0.2, gt=0, lt=1, description="the ratio stays above 1 - clip_low where A < 0")
    clip_high: Annotated[float, Width()] = Field(
        0.2, gt=0, le=100, description="the ratio stays below 1 + clip_high where A > 0"
    )
    cap: float = Field(3.0, ge=1, le=1e6, description="largest weight of a token")

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Weigh each token; shapes as in `ClipInputs`, objective ``(B, T)``."""
        log_ratio, advantages = ops.log_ratio(inputs), inputs.advantages.detach().float()
        band = ops.ratio_band(self.clip_low, self.clip_high, None, like=log_ratio)
        clamped, clipped = ops.clamp_by_advantage(log_ratio.detach(), advantages, band)
        weight = torch.where(advantages > 0, -clamped, clamped).exp().clamp(max=self.cap)
        one = torch.where(clipped, torch.ones_like(log_ratio), (log_ratio - log_ratio.detach()).exp())
        return ClipResult(weight * advantages * one, log_ratio.detach(), clipped, band)


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """The policies of this plugin."""
    return [ASPO]
