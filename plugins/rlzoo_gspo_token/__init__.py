"""GSPO-token: GSPO's ratio and clip, with per-token gradients."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from rlzoo import ClipInputs, ClipPolicy, ClipResult, Width, hookimpl, ops


class GSPOToken(ClipPolicy):
    """Clips the geometric mean of a response's token ratios and supports per-token advantages.

    Formula:
        J = mean over responses of mean_t min(s_t A_t, clip(s_t, 1 - clip_low, 1 + clip_high) A_t),
        s_t = sg[exp(S / L)] pi_t / sg[pi_t]

    Where:
        S = sum_t log(pi_t / pi_old_t), L is the response's length in tokens, and sg[.] stops the gradient. Every s_t equals
        exp(S / L), but its gradient comes only from token t.

    Differences from GRPO:
        The ratio is computed and clipped for the whole response. Only the advantage and the gradient are per token.

    Reference:
        Group Sequence Policy Optimization, arXiv 2507.18071, section 4.3, with widths of 3e-4 and 4e-4 as in its
        experiments.
    """

    name = "gspo-token"
    paper = "arXiv 2507.18071"
    scope = "token"
    watch: ClassVar = {
        "clip/fraction": "equal to that of gspo if all tokens of a response have the same advantage",
        "clip/fraction_length_bin_<k>": "falls with length, because a mean over more tokens varies less",
    }

    clip_low: Annotated[float, Width()] = Field(3e-4, gt=0, lt=1, description="the ratio stays above 1 - clip_low where A < 0")
    clip_high: Annotated[float, Width()] = Field(
        4e-4, gt=0, le=100, description="the ratio stays below 1 + clip_high where A > 0"
    )

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Clip each response's mean log-ratio with per-token gradients and return a ``(B, T)`` objective."""
        log_ratio = ops.log_ratio(inputs)
        mean = ops.sequence_mean(log_ratio.detach(), inputs.response_mask)
        band = ops.ratio_band(self.clip_low, self.clip_high, None, like=mean)
        return ops.clipped_surrogate(mean + (log_ratio - log_ratio.detach()), inputs.advantages, band)


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """Return the rules of this plugin."""
    return [GSPOToken]
