"""REC: REINFORCE with the clip as a mask, on one side of the band, on both sides, or with a ring beyond it."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from rlzoo import Advantage, ClipInputs, ClipPolicy, ClipResult, Reduction, Width, hookimpl, ops


class REC(ClipPolicy):
    """Uses the plain policy gradient of tokens within a band, with or without the ratio as a weight.

    Formula:
        J = mean over the step's tokens of sg[K_t W_t] A log pi_t,   W_t = r_t if `importance`, else 1
        one-side:  K_t = 0 where A > 0 and r_t > 1 + clip_high, or A < 0 and r_t < 1 - clip_low; else 1
        two-side:  K_t = 1 where 1 - clip_low <= r_t <= 1 + clip_high; else 0
        ring:      as two-side, and also K_t = 1 where A > 0 and r_t <= 1 - ring_low, or A < 0 and r_t >= 1 + ring_high

    Where:
        r_t = pi_t / pi_old_t, sg[.] stops the gradient, and A = R - mean of the rewards R in the group.

    Differences from GRPO:
        The clip is a mask. By default, the ratio is not used as a weight, because the clip makes REINFORCE stable off-policy
        and the weight adds little. `one-side` with `importance` has GRPO's gradient. Advantages are not divided by std, and
        the mean is over all tokens.

    Reference:
        Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm, arXiv 2509.24203, with the clips of Trinity-RFT: 0.2
        and 0.2 for the band, and 0.6 and 2.0 for the ring. The default is REC-OneSide-NoIS, for which the paper also tests
        0.6 and 2.0.
    """

    name = "rec"
    paper = "arXiv 2509.24203"
    scope = "token"
    watch: ClassVar = {
        "clip/fraction": "the share of masked tokens; higher for two-side than for one-side at equal clips",
        "ratio/sigma_token": "how far off-policy the data is; only the mask corrects for it",
    }
    exempt: ClassVar = {"only_cuts_outward": "`two-side` masks both sides, and `ring` keeps tokens further out"}

    advantage: Advantage = Field("group_mean", description="how a group's rewards become advantages")
    reduction: Reduction = Field("token_mean", description="how the objective is reduced to a scalar")
    side: Literal["one-side", "two-side", "ring"] = Field("one-side", description="which tokens outside the band are masked")
    importance: bool = Field(False, description="whether to weight tokens by their ratio")
    clip_low: Annotated[float, Width()] = Field(0.2, gt=0, lt=1, description="the band reaches down to 1 - clip_low")
    clip_high: Annotated[float, Width()] = Field(0.2, gt=0, le=100, description="the band reaches up to 1 + clip_high")
    ring_low: float = Field(0.6, gt=0, lt=1, description="ring: tokens with A > 0 and a ratio below 1 - ring_low are kept")
    ring_high: float = Field(2.0, gt=0, le=1e4, description="ring: tokens with A < 0 and a ratio above 1 + ring_high are kept")

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Mask tokens outside the band and return a ``(B, T)`` objective."""
        advantages, log_ratio = inputs.advantages.detach().float(), ops.log_ratio(inputs).detach()
        band = ops.ratio_band(self.clip_low, self.clip_high, None, like=log_ratio)
        good, bad = advantages > 0, advantages < 0
        above, below = log_ratio > band.high, log_ratio < band.low
        masked = (good & above) | (bad & below)
        if self.side != "one-side":
            masked = (above | below) & (good | bad)
        if self.side == "ring":
            ring = ops.ratio_band(self.ring_low, self.ring_high, None, like=log_ratio)
            masked = masked & ~((good & (log_ratio <= ring.low)) | (bad & (log_ratio >= ring.high)))
        weight = ops.limited_exp(log_ratio) if self.importance else torch.ones_like(log_ratio)
        objective = torch.where(masked, 0.0, weight) * advantages * ops.log_probs(inputs)
        return ClipResult(objective, log_ratio, masked)


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """Return the rules of this plugin."""
    return [REC]
