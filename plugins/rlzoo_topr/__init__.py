"""TOPR: tapered off-policy REINFORCE, with truncated importance ratios for wrong responses only."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from rlzoo import Advantage, ClipInputs, ClipPolicy, ClipResult, hookimpl, ops


class TOPR(ClipPolicy):
    """Follows the plain gradient of a good response; a bad one's fades as the response becomes unlikely.

    Formula:
        J = mean over responses of sg[weight] A sum_t log pi_t
        weight = 1 where A >= 0, min(w, 1) where A < 0,   w = exp(S)

    Where:
        S = sum_t log(pi_t / pi_old_t), sg[.] a constant for the gradient. A response counts as clipped where its weight
        is capped: A < 0 and w > 1.

    Differences from GRPO:
        No ratio at all on good responses, the response's ratio on bad ones, never above 1; nothing is cut off.

    Reference:
        Tapered Off-Policy REINFORCE, arXiv 2503.14286, which rewards with +1 and -1; here the group's mean is subtracted,
        so that rewards of 0 and 1 have both signs too.
    """

    name = "topr"
    paper = "arXiv 2503.14286"
    scope = "sequence"
    watch: ClassVar = {
        "clip/fraction_low": "the share of bad responses that have become likelier than they were: their weight is capped at 1",
        "learner/entropy": "falls where nothing holds the good responses back",
    }
    exempt: ClassVar = {"clipped_means_no_gradient": "a response whose weight is capped keeps its gradient"}

    advantage: Advantage = Field("group_mean", description="how the rewards of a group become advantages")

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Weigh each response; shapes as in `ClipInputs`, objective ``(B, 1)``."""
        advantages = inputs.advantages.detach().float()
        total = ops.sequence_sum(ops.log_ratio(inputs).detach(), inputs.response_mask)
        weight = torch.where(advantages < 0, ops.limited_exp(total.clamp(max=0)), 1.0)
        objective = weight * advantages * ops.sequence_sum(ops.log_probs(inputs), inputs.response_mask)
        return ClipResult(objective, total, (advantages < 0) & (total > 0))


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """The policies of this plugin."""
    return [TOPR]
