"""GSPO: clips the geometric-mean ratio of a response to a fixed band."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from rlzoo import ClipInputs, ClipPolicy, ClipResult, Width, hookimpl, ops


class GSPO(ClipPolicy):
    """Clips the geometric mean of a response's token ratios to the same narrow band at every length.

    Formula:
        J = mean over responses of min(s A, clip(s, 1 - clip_low, 1 + clip_high) A),   s = exp(S / L)

    Where:
        S = sum_t log(pi_t / pi_old_t). L is the response's length in tokens, and A is its advantage.

    Differences from GRPO:
        There is one ratio per response, the L-th root of its importance ratio, so that either all of the response's tokens are
        clipped or none are. The band is about a thousand times narrower, because a mean over L tokens varies little.

    Reference:
        Group Sequence Policy Optimization, arXiv 2507.18071, with widths of 3e-4 and 4e-4 as in its experiments. `dual_clip`
        is an rlzoo addition.
    """

    name = "gspo"
    paper = "arXiv 2507.18071"
    scope = "sequence"
    watch: ClassVar = {
        "clip/fraction": "0 at the usual width of 0.2; close to 1 with 3e-4 and a small model",
        "clip/fraction_length_bin_<k>": "falls with length, because a mean over more tokens varies less",
    }

    clip_low: Annotated[float, Width()] = Field(3e-4, gt=0, lt=1, description="the ratio stays above 1 - clip_low where A < 0")
    clip_high: Annotated[float, Width()] = Field(
        4e-4, gt=0, le=100, description="the ratio stays below 1 + clip_high where A > 0"
    )
    dual_clip: float | None = Field(None, gt=1, le=1e6, description="largest ratio where A < 0; null for none")

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Clip each response's mean log-ratio and return a ``(B, 1)`` objective."""
        log_ratio = ops.sequence_mean(ops.log_ratio(inputs), inputs.response_mask)
        band = ops.ratio_band(self.clip_low, self.clip_high, self.dual_clip, like=log_ratio)
        return ops.clipped_surrogate(log_ratio, inputs.advantages, band)


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """Return the rules of this plugin."""
    return [GSPO]
