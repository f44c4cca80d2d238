"""FSPO: clips the summed log-ratio to a band that grows with the square root of the response length."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from rlzoo import ClipBand, ClipInputs, ClipPolicy, ClipResult, Width, hookimpl, ops


class FSPO(ClipPolicy):
    """Clips the importance ratio of a whole response to a band that grows with the square root of its length.

    Formula:
        J = mean over responses of exp(clamp(S)) A,   S = sum_t log(pi_t / pi_old_t)
        clamp(S) = min(S, drift L + width_high sqrt(L))                                     where A > 0
        clamp(S) = max(S, drift L - width_low sqrt(L)), at most drift L + width_ceiling sqrt(L)  where A < 0

    Where:
        L is the response's length in tokens, and A is its advantage. Under the old policy, S is approximately normal with
        mean mu L and variance sigma^2 L. If `drift` is mu and a width is z sigma, the same share is clipped at every length.
        With another `exponent`, L^exponent replaces sqrt(L), and the widths need other values. With 0, the band is RLOO's. With
        1, responses are clipped as with GSPO's band on the mean log-ratio but are weighted by the importance ratio.

    Differences from GRPO:
        The importance ratio is the product of a response's token ratios, so that the response is clipped as a unit. The
        widths are in log space and are multiplied by sqrt(L). They are not distances from a ratio of 1.

    Reference:
        Fair Sequence Policy Optimization (FSPO), arXiv 2509.09177. Version 1 centres the band on the drift. Versions 2 and 3
        set the drift to 0, which is the default here. The paper mentions a dual clip, but we found no value for it. The default
        of 0.09 and the setting `exponent` are rlzoo's own.
    """

    name = "fspo"
    paper = "arXiv 2509.09177"
    scope = "sequence"
    watch: ClassVar = {
        "clip/fraction_length_bin_<k>": "flat if the band suits the model; rises if log-ratios are correlated or drift",
        "fairness/lre_max": "compare rules only at equal clip/fraction",
        "ratio/sigma_token": "a width divided by this is z; unless it far exceeds ratio/mu_token times sqrt(L), set drift",
        "clip/fraction_dual": "the share of responses that are clipped at the ceiling for A < 0",
        "learner/grad_clipped": "close to 1, because the norm of a sum over tokens grows with L",
    }

    width_low: Annotated[float, Width()] = Field(
        0.03, gt=0, le=10, description="width of the band below its centre, per sqrt(token)"
    )
    width_high: Annotated[float, Width()] = Field(
        0.03, gt=0, le=10, description="width of the band above its centre, per sqrt(token)"
    )
    exponent: float = Field(
        0.5, ge=0, le=2, description="exponent of the length in the width of the band; 1/2: the square root"
    )
    drift: float = Field(0.0, ge=-1, le=1, description="centre of the band per token: the mean token log-ratio")
    width_ceiling: Annotated[float | None, Width()] = Field(
        0.09, gt=0, le=10, description="dual clip where A < 0: ceiling of the log-ratio per sqrt(token); null for none"
    )

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Clip each response's summed log-ratio and return a ``(B, 1)`` objective."""
        length = ops.lengths(inputs.response_mask)
        centre, growth = self.drift * length, length**self.exponent
        band = ClipBand(
            low=centre - self.width_low * growth,
            high=centre + self.width_high * growth,
            ceiling=None if self.width_ceiling is None else centre + self.width_ceiling * growth,
        )
        log_ratio = ops.sequence_sum(ops.log_ratio(inputs), inputs.response_mask)
        return ops.clipped_surrogate(log_ratio, inputs.advantages, band)


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """Return the rules of this plugin."""
    return [FSPO]
