"""CISPO: a policy gradient with clipped importance weights."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from rlzoo import ClipInputs, ClipPolicy, ClipResult, Reduction, Width, hookimpl, ops


class CISPO(ClipPolicy):
    """Weights each token's gradient by its ratio, clipped to [1 - clip_low, 1 + clip_high]. No token is dropped.

    Formula:
        J = mean over the step's tokens of sg[clip(r_t, 1 - clip_low, 1 + clip_high)] A log pi_t

    Where:
        r_t = pi_t / pi_old_t, and sg[.] stops the gradient. There is no floor if `clip_low` is null. A token counts as
        clipped if its ratio is beyond the bound towards which its advantage pushes it.

    Differences from GRPO:
        Beyond the bound, a token's gradient is weighted by the bound, whereas GRPO drops the gradient. The mean is over all
        tokens.

    Reference:
        MiniMax-M1, arXiv 2506.13585, which sets no floor and does not state the value of its ceiling. The Art of Scaling
        Reinforcement Learning Compute for LLMs, arXiv 2510.13786, caps the ratio itself, as TRL does. Its cap of 5
        corresponds to a `clip_high` of 4, the default.
    """

    name = "cispo"
    paper = "arXiv 2506.13585"
    scope = "token"
    watch: ClassVar = {
        "clip/fraction": "the share of tokens whose weight is at its bound; they still learn",
        "ratio/log_ratio_max": "the ceiling is active if this is above log(1 + clip_high)",
    }
    exempt: ClassVar = {"clipped_means_no_gradient": "a capped token keeps its gradient, weighted by the bound"}

    reduction: Reduction = Field("token_mean", description="how the objective is reduced to a scalar")
    clip_low: Annotated[float | None, Width()] = Field(
        None, gt=0, lt=1, description="the weight stays above 1 - clip_low; null for no floor"
    )
    clip_high: Annotated[float, Width()] = Field(4.0, gt=0, le=1e6, description="the weight stays below 1 + clip_high")

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Clip each token's weight and return a ``(B, T)`` objective."""
        log_ratio, advantages = ops.log_ratio(inputs).detach(), inputs.advantages.detach().float()
        ratio, floor, cap = ops.limited_exp(log_ratio), None if self.clip_low is None else 1 - self.clip_low, 1 + self.clip_high
        weight: Tensor = ratio.clamp(min=floor, max=cap)
        clipped = (advantages > 0) & (ratio > cap)
        if floor is not None:
            clipped = clipped | ((advantages < 0) & (ratio < floor))
        return ClipResult(weight * advantages * ops.log_probs(inputs), log_ratio, clipped)


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """Return the rules of this plugin."""
    return [CISPO]
