"""CFPO: a quadratic penalty on every token's ratio instead of a clip."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from rlzoo import ClipInputs, ClipPolicy, ClipResult, Width, hookimpl, ops


class CFPO(ClipPolicy):
    """Keeps every token's ratio near 1 with a quadratic objective that peaks where PPO's clip would begin.

    Formula:
        J = mean over responses of mean_t r_t A - |A| / (2 width) (r_t - 1)^2,   r_t = pi_t / pi_old_t

    Where:
        A is the advantage. The gradient is zero at r_t = 1 + width (A > 0) or 1 - width (A < 0) and reverses beyond it,
        where the token counts as clipped.

    Differences from GRPO:
        Outside the band, a token is pulled back, whereas GRPO only drops its gradient. The penalty also acts within the band.

    Reference:
        Clipping-Free Policy Optimization, arXiv 2601.22801, equation 7, with PPO's clip range of 0.2 as the width, as in the
        paper.
    """

    name = "cfpo"
    paper = "arXiv 2601.22801"
    scope = "token"
    watch: ClassVar = {
        "clip/fraction": "the share of tokens that are pulled back",
        "ratio/log_ratio_max": "kept near log(1 + width) only by the penalty",
    }
    exempt: ClassVar = {"clipped_means_no_gradient": "the gradient reverses and is never cut"}

    width: Annotated[float, Width()] = Field(0.2, gt=0, le=100, description="distance of the ratio from 1 at which J peaks")

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Penalise each token's ratio and return a ``(B, T)`` objective."""
        log_ratio, advantages = ops.log_ratio(inputs), inputs.advantages.detach().float()
        ratio = ops.limited_exp(log_ratio)
        moved = ratio.detach() - 1
        reversed_ = ((advantages > 0) & (moved > self.width)) | ((advantages < 0) & (moved < -self.width))
        objective = ratio * advantages - advantages.abs() / (2 * self.width) * (ratio - 1).square()
        return ClipResult(objective, log_ratio.detach(), reversed_)


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """Return the rules of this plugin."""
    return [CFPO]
