"""RLOO: leave-one-out advantages with a fixed clip band on the summed log-ratio."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from rlzoo import Advantage, ClipInputs, ClipPolicy, ClipResult, Width, hookimpl, ops


class RLOO(ClipPolicy):
    """Clips the importance ratio of a whole response to the same band at every length.

    Formula:
        J = mean over responses of min(w A, clip(w, 1 - clip_low, 1 + clip_high) A),   w = exp(S)

    Where:
        S = sum_t log(pi_t / pi_old_t), and A_i = R_i - mean of the other rewards in the group. Nothing is clipped if both
        widths are null.

    Differences from GRPO:
        The baseline of the advantage excludes the response itself, and advantages are not divided by std. The importance
        ratio is computed for the whole response.

    Reference:
        Back to Basics, arXiv 2402.14740, which takes one update per rollout and needs no clip. The clip is taken from the
        RLOO baseline in arXiv 2509.09177. Its default of 0.2 is from TRL's RLOOTrainer. `dual_clip` is an rlzoo addition.
    """

    name = "rloo"
    paper = "arXiv 2402.14740"
    scope = "sequence"
    watch: ClassVar = {
        "clip/fraction_length_bin_<k>": "rises with length, because the spread of S grows with sqrt(L), but the band does not",
        "fairness/ess": "without a clip, the share of responses that carry the gradient",
    }

    advantage: Advantage = Field("leave_one_out", description="how a group's rewards become advantages")
    clip_low: Annotated[float | None, Width()] = Field(
        0.2, gt=0, lt=1, description="the ratio stays above 1 - clip_low where A < 0; null for no clip"
    )
    clip_high: Annotated[float | None, Width()] = Field(
        0.2, gt=0, le=100, description="the ratio stays below 1 + clip_high where A > 0; null for no clip"
    )
    dual_clip: float | None = Field(None, gt=1, le=1e6, description="largest ratio where A < 0; null for none")

    @model_validator(mode="after")
    def _both_or_neither(self) -> Self:
        if (self.clip_low is None) != (self.clip_high is None):
            raise ValueError("clip_low and clip_high must both be numbers, or both null for no clip")
        if self.clip_low is None and self.dual_clip is not None:
            raise ValueError("dual_clip needs clip_low and clip_high")
        return self

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Clip each response's summed log-ratio and return a ``(B, 1)`` objective."""
        log_ratio = ops.sequence_sum(ops.log_ratio(inputs), inputs.response_mask)
        if self.clip_low is None or self.clip_high is None:
            return ops.clipped_surrogate(log_ratio, inputs.advantages, band=None)
        band = ops.ratio_band(self.clip_low, self.clip_high, self.dual_clip, like=log_ratio)
        return ops.clipped_surrogate(log_ratio, inputs.advantages, band)


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """Return the rules of this plugin."""
    return [RLOO]
