"""The alpha family: a clip band on the summed log-ratio that grows with any power of the response length."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from rlzoo import ClipBand, ClipInputs, ClipPolicy, ClipResult, Width, hookimpl, ops


class AlphaBand(ClipPolicy):
    """Clips the importance ratio of a whole response to a band that grows with the length to the power `alpha`.

    Formula:
        J = mean over responses of exp(clamp(S)) A,   S = sum_t log(pi_t / pi_old_t)
        clamp(S) = min(S, drift L + width_high L^alpha)                                     where A > 0
        clamp(S) = max(S, drift L - width_low L^alpha), at most drift L + width_ceiling L^alpha  where A < 0

    Where:
        L is the response's length in tokens, A its advantage. alpha 0 is the RLOO baseline's band of one width for every
        length, 1/2 is FSPO's, 1 accepts what GSPO accepts (a band on the mean) with the importance ratio kept as weight.

    Differences from GRPO:
        The ratio is the response's, so a response is clipped whole, in log space.

    Reference:
        Ours, to ask of FSPO (arXiv 2509.09177) whether its exponent is right: 1/2 follows from token log-ratios that are
        independent of each other. Widths are those of `fspo`; another alpha needs other ones.
    """

    name = "alpha-band"
    paper = "arXiv 2509.09177"
    scope = "sequence"
    watch: ClassVar = {
        "clip/fraction_length_bin_<k>": "level at the right alpha: rising with length says larger, falling says smaller",
        "fairness/lre_max": "compare alphas only where clip/fraction is the same",
    }

    alpha: float = Field(0.5, ge=0, le=2, description="power of the length with which the band grows")
    width_low: Annotated[float, Width()] = Field(0.03, gt=0, le=100, description="width of the band below, per token^alpha")
    width_high: Annotated[float, Width()] = Field(0.03, gt=0, le=100, description="width of the band above, per token^alpha")
    drift: float = Field(0.0, ge=-1, le=1, description="centre of the band per token: the mean token log-ratio")
    width_ceiling: Annotated[float | None, Width()] = Field(
        0.09, gt=0, le=100, description="dual clip where A < 0: ceiling of the log-ratio per token^alpha; null for none"
    )

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Clip each response's summed log-ratio; shapes as in `ClipInputs`, objective ``(B, 1)``."""
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
    """The policies of this plugin."""
    return [AlphaBand]
