"""DCPO: PPO's clip with a band that is wider for tokens whose old probability is low."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from rlzoo import ClipBand, ClipInputs, ClipPolicy, ClipResult, Width, hookimpl, ops


class DCPO(ClipPolicy):
    """Clips every token's ratio to a band that widens as the token's old probability decreases.

    Formula:
        J = mean over responses of mean_t min(r_t A, clip(r_t, low_t, high_t) A),   r_t = pi_t / pi_old_t
        low_t = 1/2 + 1/2 sqrt(max(1 - 4 eps_low / q_t, 0)),   high_t = min(1/2 + 1/2 sqrt(1 + 4 eps_high / q_t), cap)

    Where:
        q_t = pi_old_t is the token's probability before the update. The edges solve |(r - 1) r| q = eps, which bounds the
        change in the probability, weighted by the ratio.

    Differences from GRPO:
        A token with probability 0.01 may become 5 times as likely, and one with probability 0.9 may become 1.19 times as
        likely. GRPO's band is 0.8 to 1.2 for both tokens.

    Reference:
        DCPO, arXiv 2509.02333, with widths of 0.16 and 0.2 and a cap of 10, as in the paper.
    """

    name = "dcpo"
    paper = "arXiv 2509.02333"
    scope = "token"
    watch: ClassVar = {
        "clip/fraction": "the share of clipped tokens; lower than for grpo, which clips rare tokens",
        "ratio/log_ratio_max": "up to log(cap) for the rarest tokens",
    }

    eps_low: Annotated[float, Width()] = Field(
        0.16, gt=0, le=100, description="width of the band below 1, scaled by the probability"
    )
    eps_high: Annotated[float, Width()] = Field(
        0.2, gt=0, le=1000, description="width of the band above 1, scaled by the probability"
    )
    cap: float = Field(10.0, gt=1, le=1e6, description="largest ratio where A > 0, for any probability")

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Clip each token's log-ratio and return a ``(B, T)`` objective."""
        log_ratio = ops.log_ratio(inputs)
        before = ops.limited_exp(ops.log_probs(inputs).detach() - log_ratio.detach())
        low = 0.5 + 0.5 * (1 - 4 * self.eps_low / before).clamp(min=0).sqrt()
        high = (0.5 + 0.5 * (1 + 4 * self.eps_high / before).sqrt()).clamp(max=self.cap)
        return ops.clipped_surrogate(log_ratio, inputs.advantages, ClipBand(low=low.log(), high=high.log()))


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """Return the rules of this plugin."""
    return [DCPO]
