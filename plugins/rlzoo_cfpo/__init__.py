"""CFPO: a quadratic penalty on every token's ratio, in place of the clip."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from rlzoo import ClipInputs, ClipPolicy, ClipResult, Width, hookimpl, ops


class CFPO(ClipPolicy):
    """Holds every token's ratio near 1 by a parabola that peaks where PPO's clip would begin.

    Formula:
        J = mean over responses of mean_t r_t A - |A| / (2 width) (r_t - 1)^2,   r_t = pi_t / pi_old_t

    Where:
        A is the advantage. The gradient vanishes at r_t = 1 + width (A > 0) or 1 - width (A < 0) and turns round beyond
        it; a token counts as clipped there.

    Differences from GRPO:
        Beyond the band a token is pulled back where GRPO lets go of it; below it the pull is already felt.

    Reference:
        Clipping-Free Policy Optimization, arXiv 2601.22801, equation 7; width 0.2 is PPO's clip range, as there.
    """

    name = "cfpo"
    paper = "arXiv 2601.22801"
    scope = "token"
    watch: ClassVar = {
        "clip/fraction": "the share of tokens that are pulled back",
        "ratio/log_ratio_max": "held near log(1 + width) by the pull alone",
    }
    exempt: ClassVar = {"clipped_means_no_gradient": "the gradient turns round and is never cut"}

    width: Annotated[float, Width()] = Field(0.2, gt=0, le=100, description="distance of the ratio from 1 at which J peaks")

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Penalise each token's ratio; shapes as in `ClipInputs`, objective ``(B, T)``."""
        log_ratio, advantages = ops.log_ratio(inputs), inputs.advantages.detach().float()
        ratio = ops.limited_exp(log_ratio)
        moved = ratio.detach() - 1
        reversed_ = ((advantages > 0) & (moved > self.width)) | ((advantages < 0) & (moved < -self.width))
        objective = ratio * advantages - advantages.abs() / (2 * self.width) * (ratio - 1).square()
        return ClipResult(objective, log_ratio.detach(), reversed_)


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """The policies of this plugin."""
    return [CFPO]
