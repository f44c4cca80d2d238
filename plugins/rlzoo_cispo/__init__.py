"""CISPO: a policy gradient with clipped importance weights, in two versions that define the bound differently."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from rlzoo import ClipInputs, ClipPolicy, ClipResult, Reduction, Width, hookimpl, ops

EXEMPT = {"clipped_means_no_gradient": "a capped token keeps its gradient, weighted by the bound"}


class CISPO(ClipPolicy):
    """Weights each token's gradient by its ratio, clipped to [1 - clip_low, 1 + clip_high]; no token is dropped.

    Formula:
        J = mean over the step's tokens of sg[clip(r_t, 1 - clip_low, 1 + clip_high)] A log pi_t

    Where:
        r_t = pi_t / pi_old_t, and sg[.] stops the gradient. There is no floor if `clip_low` is null. A token counts as
        clipped if its ratio is beyond the bound towards which its advantage pushes it.

    Differences from GRPO:
        Beyond the bound, a token's gradient is weighted by the bound, whereas GRPO drops the gradient. The mean is over all
        tokens.

    Reference:
        MiniMax-M1, arXiv 2506.13585, which sets no floor and does not state the value of its ceiling. The default ceiling of
        1 + 4 is the cap of arXiv 2510.13786 (see `cispo-absolute`).
    """

    name = "cispo"
    paper = "arXiv 2506.13585"
    scope = "token"
    watch: ClassVar = {
        "clip/fraction": "the share of tokens whose weight is at its bound; they still learn",
        "ratio/log_ratio_max": "the ceiling is active if this is above log(1 + clip_high)",
    }
    exempt = EXEMPT

    reduction: Reduction = Field("token_mean", description="how the objective is reduced to a scalar")
    clip_low: Annotated[float | None, Width()] = Field(
        None, gt=0, lt=1, description="the weight stays above 1 - clip_low; null for no floor"
    )
    clip_high: Annotated[float, Width()] = Field(4.0, gt=0, le=1e6, description="the weight stays below 1 + clip_high")

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Clip each token's weight, and return a ``(B, T)`` objective."""
        floor = None if self.clip_low is None else 1 - self.clip_low
        return weighted_policy_gradient(inputs, floor, 1 + self.clip_high)


class CISPOAbsolute(ClipPolicy):
    """Weights each token's gradient by its ratio, up to `cap`; no token is dropped.

    Formula:
        J = mean over the step's tokens of sg[min(r_t, cap)] A log pi_t

    Where:
        r_t = pi_t / pi_old_t, and sg[.] stops the gradient. A token counts as clipped if its weight is capped and its
        advantage pushes its ratio further up.

    Differences from GRPO:
        Beyond the cap, the gradient is weighted by the cap. The bound is a ratio, not a distance from 1: `cispo` with
        clip_high = cap - 1 is the same rule.

    Reference:
        The Art of Scaling Reinforcement Learning Compute for LLMs, arXiv 2510.13786; the cap of 5 lies in the range that the
        paper tests. TRL interprets the bound in the same way.
    """

    name = "cispo-absolute"
    paper = "arXiv 2510.13786"
    scope = "token"
    watch: ClassVar = {
        "clip/fraction": "the share of tokens whose weight is at the cap; they still learn",
        "ratio/log_ratio_max": "the cap is active if this is above log(cap)",
    }
    exempt = EXEMPT

    reduction: Reduction = Field("token_mean", description="how the objective is reduced to a scalar")
    cap: Annotated[float, Width()] = Field(5.0, gt=0, le=1e6, description="largest weight of a token")

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Cap each token's weight, and return a ``(B, T)`` objective."""
        return weighted_policy_gradient(inputs, None, self.cap)


def weighted_policy_gradient(inputs: ClipInputs, floor: float | None, cap: float) -> ClipResult:
    """Compute ``sg[clip(r, floor, cap)] A log pi`` per token."""
    log_ratio, advantages = ops.log_ratio(inputs).detach(), inputs.advantages.detach().float()
    ratio = ops.limited_exp(log_ratio)
    weight: Tensor = ratio.clamp(min=floor, max=cap)
    clipped = (advantages > 0) & (ratio > cap)
    if floor is not None:
        clipped = clipped | ((advantages < 0) & (ratio < floor))
    return ClipResult(weight * advantages * ops.log_probs(inputs), log_ratio, clipped)


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """Return the clip policies that this plugin provides."""
    return [CISPO, CISPOAbsolute]
