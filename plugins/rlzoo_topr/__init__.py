"""TOPR: tapered off-policy REINFORCE, which weights only wrong responses by an importance ratio that is truncated at 1."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from rlzoo import Advantage, ClipInputs, ClipPolicy, ClipResult, hookimpl, ops


class TOPR(ClipPolicy):
    """Uses the plain gradient where A >= 0. Where A < 0, the gradient fades as the response becomes less likely.

    Formula:
        J = mean over responses of sg[weight] A sum_t log pi_t
        weight = 1 where A >= 0, min(w, 1) where A < 0,   w = exp(S)

    Where:
        S = sum_t log(pi_t / pi_old_t), and sg[.] stops the gradient. A response counts as clipped if its weight is capped:
        A < 0 and w > 1.

    Differences from GRPO:
        Responses with A >= 0 are not weighted by a ratio. Responses with A < 0 are weighted by their importance ratio, up to
        1. No gradient is cut off.

    Reference:
        Tapered Off-Policy REINFORCE, arXiv 2503.14286, which uses rewards of +1 and -1. Here, the group's mean is
        subtracted, so that rewards of 0 and 1 also lead to advantages of both signs.
    """

    name = "topr"
    paper = "arXiv 2503.14286"
    scope = "sequence"
    watch: ClassVar = {
        "clip/fraction_low": "the share of responses with A < 0 that have become likelier, whose weight is capped at 1",
        "learner/entropy": "falls if nothing limits the responses with A > 0",
    }
    exempt: ClassVar = {"clipped_means_no_gradient": "a response whose weight is capped keeps its gradient"}

    advantage: Advantage = Field("group_mean", description="how a group's rewards become advantages")

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Weight each response and return a ``(B, 1)`` objective."""
        advantages = inputs.advantages.detach().float()
        total = ops.sequence_sum(ops.log_ratio(inputs).detach(), inputs.response_mask)
        weight = torch.where(advantages < 0, ops.limited_exp(total.clamp(max=0)), 1.0)
        objective = weight * advantages * ops.sequence_sum(ops.log_probs(inputs), inputs.response_mask)
        return ClipResult(objective, total, (advantages < 0) & (total > 0))


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """Return the rules of this plugin."""
    return [TOPR]
