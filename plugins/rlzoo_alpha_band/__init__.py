"""Alpha band: clips the summed log-ratio to a band that grows with a power of the response length."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from rlzoo import ClipBand, ClipInputs, ClipPolicy, ClipResult, Width, hookimpl, ops


class AlphaBand(ClipPolicy):
    """Clips the importance ratio of a whole response to a band that grows with its length to the power `alpha`.

    Formula:
        J = mean over responses of exp(clamp(S)) A,   S = sum_t log(pi_t / pi_old_t)
        clamp(S) = min(S, drift L + width_high L^alpha)                                     where A > 0
        clamp(S) = max(S, drift L - width_low L^alpha), at most drift L + width_ceiling L^alpha  where A < 0

    Where:
        L is the response's length in tokens, and A is its advantage. alpha = 0 gives the RLOO baseline's band, which has one
        width for all lengths. alpha = 1/2 gives FSPO's band. With alpha = 1, the same responses are clipped as with GSPO's
        band on the mean log-ratio, but the weight is still the importance ratio.

    Differences from GRPO:
        The importance ratio of the whole response is clipped as a unit, in log space.

    Reference:
        This rule originates in rlzoo. It tests FSPO's exponent of 1/2 (arXiv 2509.09177), which assumes that token
        log-ratios are independent. The default widths are the same as in `fspo`; other values of alpha need other widths.
    """

    name = "alpha-band"
    paper = "arXiv 2509.09177"
    scope = "sequence"
    watch: ClassVar = {
        "clip/fraction_length_bin_<k>": "flat at the right alpha; raise alpha if this rises with length, lower it if it falls",
        "fairness/lre_max": "compare values of alpha only at equal clip/fraction",
    }

    alpha: float = Field(0.5, ge=0, le=2, description="exponent of the length: the band grows as L^alpha")
    width_low: Annotated[float, Width()] = Field(
        0.03, gt=0, le=100, description="width of the band below its centre, per token^alpha"
    )
    width_high: Annotated[float, Width()] = Field(
        0.03, gt=0, le=100, description="width of the band above its centre, per token^alpha"
    )
    drift: float = Field(0.0, ge=-1, le=1, description="centre of the band per token: the mean token log-ratio")
    width_ceiling: Annotated[float | None, Width()] = Field(
        0.09, gt=0, le=100, description="dual clip where A < 0: ceiling of the log-ratio per token^alpha; null for none"
    )

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Clip each response's summed log-ratio, and return a ``(B, 1)`` objective."""
        length = ops.lengths(inputs.response_mask)
        centre, growth = self.drift * length, length**self.alpha
        band = ClipBand(
            low=centre - self.width_low * growth,
            high=centre + self.width_high * growth,
            ceiling=None if self.width_ceiling is None else centre + self.width_ceiling * growth,
        )
        log_ratio = ops.sequence_sum(ops.log_ratio(inputs), inputs.response_mask)
        return ops.clipped_surrogate(log_ratio, inputs.advantages, band)


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """Return the clip policies that this plugin provides."""
    return [AlphaBand]
