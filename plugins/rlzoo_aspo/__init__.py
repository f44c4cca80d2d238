"""ASPO: inverts the ratio of tokens with A > 0 so that tokens that have become less likely get more weight."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field

from rlzoo import ClipInputs, ClipPolicy, ClipResult, Reduction, Width, hookimpl, ops


class ASPO(ClipPolicy):
    """Weights tokens with A > 0 by the inverse ratio and other tokens by the ratio, up to a cap, within GRPO's band.

    Formula:
        J = mean over the step's tokens of sg[w_t] A pi_t / sg[pi_t],   r_t = pi_t / pi_old_t
        w_t = min(1 / r_t, cap) where A > 0, min(r_t, cap) where A < 0
        no gradient where A > 0 and r_t > 1 + clip_high, or A < 0 and r_t < 1 - clip_low: constant, with the edge's weight

    Where:
        sg[.] stops the gradient, and A = (R - mean) / std, with the mean and std of the rewards R in the group. A capped
        token keeps its gradient and does not count as clipped.

    Differences from GRPO:
        GRPO weights a token with A > 0 by its ratio, which gives more weight to tokens that have become likelier. Here,
        tokens that have become less likely get more weight. The cap also bounds the weight where A < 0. The mean is over all
        tokens.

    Reference:
        Asymmetric Importance Sampling Policy Optimization, arXiv 2510.06062, equation 3, with clips of 0.2. The paper does
        not state the cap, so its value of 3 is from the released code. The released code also makes the clips depend on the
        token's entropy: 0.4 for the 20% of tokens with the highest entropy, and 0.2 for the others.
    """

    name = "aspo"
    paper = "arXiv 2510.06062"
    scope = "token"
    watch: ClassVar = {
        "clip/fraction": "the share of tokens outside the band, as in grpo",
        "ratio/log_ratio_min": "tokens with A > 0 are capped if this is below -log(cap)",
    }

    reduction: Reduction = Field("token_mean", description="how the objective is reduced to a scalar")
    clip_low: Annotated[float, Width()] = Field(0.2, gt=0, lt=1, description="the ratio stays above 1 - clip_low where A < 0")
    clip_high: Annotated[float, Width()] = Field(
        0.2, gt=0, le=100, description="the ratio stays below 1 + clip_high where A > 0"
    )
    cap: float = Field(3.0, ge=1, le=1e6, description="largest weight of a token")

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Weight each token and return a ``(B, T)`` objective."""
        log_ratio, advantages = ops.log_ratio(inputs), inputs.advantages.detach().float()
        band = ops.ratio_band(self.clip_low, self.clip_high, None, like=log_ratio)
        clamped, clipped = ops.clamp_by_advantage(log_ratio.detach(), advantages, band)
        weight = torch.where(advantages > 0, -clamped, clamped).exp().clamp(max=self.cap)
        one = torch.where(clipped, torch.ones_like(log_ratio), (log_ratio - log_ratio.detach()).exp())
        return ClipResult(weight * advantages * one, log_ratio.detach(), clipped, band)


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """Return the rules of this plugin."""
    return [ASPO]
