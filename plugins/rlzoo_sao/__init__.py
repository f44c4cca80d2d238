"""SAO: the policy gradient inside a wide band of ratios to the sampler, and no gradient outside the band."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field

from rlzoo import ClipInputs, ClipPolicy, ClipResult, Reduction, Width, hookimpl, ops


class SAO(ClipPolicy):
    """Drops every token whose ratio to the sampler is outside a wide band, regardless of the sign of its advantage.

    Formula:
        J = mean over the step's tokens of M_t r_t A_t,   r_t = pi_t / pi_rollout_t
        M_t = 1 where 1 - clip_low < r_t < 1 + clip_high, else 0

    Where:
        pi_rollout is the sampler's probability, or pi_old if the sampler reported none.

    Differences from GRPO:
        The ratio is relative to the sampler, so no correction is needed for stale responses. A token outside the band is
        dropped even if its advantage would bring it back. The band is wide, and the mean is over all tokens.

    Reference:
        The rule of single-rollout asynchronous optimisation, arXiv 2607.07508. The recipe `--config sao` adds the critic. The
        band from 0.2 to 4 is from Lego-RL's port.
    """

    name = "sao"
    paper = "arXiv 2607.07508"
    scope = "token"
    ratio_to_sampler = True
    watch: ClassVar = {
        "clip/fraction": "the share of tokens outside the band; they have no gradient, so it should be small",
        "critic/explained_variance": "with the critic of the recipe: 0 or below means that the values do not help",
        "rollout/staleness": "a wider band keeps tokens of responses that are more stale",
    }
    exempt: ClassVar = {"only_cuts_outward": "a token outside the band is dropped even if its advantage would bring it back"}

    reduction: Reduction = Field("token_mean", description="how the objective is reduced to a scalar")
    clip_low: Annotated[float, Width()] = Field(0.8, gt=0, lt=1, description="the smallest ratio is 1 - clip_low")
    clip_high: Annotated[float, Width()] = Field(3.0, gt=0, le=1e6, description="the largest ratio is 1 + clip_high")

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Drop tokens outside the band and return a ``(B, T)`` objective."""
        log_ratio = ops.log_ratio(inputs, against="rollout")
        advantages, judged = inputs.advantages.detach().float(), log_ratio.detach()
        band = ops.ratio_band(self.clip_low, self.clip_high, None, like=judged)
        outside = (judged <= band.low) | (judged >= band.high)
        objective = ops.limited_exp(log_ratio) * advantages
        return ClipResult(torch.where(outside, 0.0, objective), judged, outside & (advantages != 0))


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """Return the rules of this plugin."""
    return [SAO]
