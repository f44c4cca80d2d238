"""GVPO: fits the differences between summed log-ratios within a group to the differences between rewards."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field

from rlzoo import Advantage, ClipInputs, ClipPolicy, ClipResult, hookimpl, ops


class GVPO(ClipPolicy):
    """Fits the log-ratios of a prompt's responses to their rewards by least squares, after centring both within the group.

    Formula:
        J = mean over prompts of -1 / (2 (G - 1)) sum_i [beta (S_i - mean_j S_j) - (R_i - mean_j R_j)]^2
        S_i = sum_t log(pi_t / pi_old_t)

    Where:
        i and j run over the G responses to one prompt, and R_i is the reward. A response counts as clipped if its log-ratio
        is beyond the fitted value, so that its gradient reverses.

    Differences from GRPO:
        No ratio is exponentiated and no gradient is cut. The error is 0 if the policy maximises the reward under a KL
        penalty of beta. Rewards are not divided by std.

    Reference:
        Group Variance Policy Optimization, arXiv 2504.19599, with a beta of 0.1 as in the released code. The released code
        sums over the prompts of a micro-batch, whereas this rule takes their mean.
    """

    name = "gvpo"
    paper = "arXiv 2504.19599"
    scope = "batch"
    needs: ClassVar = frozenset({"group_ids", "rewards"})
    learns_without_advantages = True
    watch: ClassVar = {
        "clip/fraction": "the share of responses that are pulled back; high if beta or the updates are large",
        "ratio/mu_token": "falls if the fit makes all responses in a group less likely",
    }
    exempt: ClassVar = {
        "advantages_scale_the_gradient": "the rule uses rewards instead of advantages",
        "zero_advantage_zero_gradient": "the rule uses rewards instead of advantages, and the fit affects every response",
        "clipped_means_no_gradient": "the gradient reverses and is never cut",
    }

    advantage: Advantage = Field(
        "group_mean", description="how a group's rewards become advantages; the formula does not use them"
    )
    reduction: Literal["sequence_mean", "sequence_mean_token_sum", "constant_length"] = Field(
        "sequence_mean", description="how the objective is reduced to a scalar"
    )
    beta: float = Field(0.1, gt=0, le=1e6, description="weight of the KL penalty to whose optimum the model is fitted")

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Fit each group and return a ``(B, 1)`` objective."""
        assert inputs.group_ids is not None, "gvpo needs group_ids: fill ClipInputs.group_ids"
        assert inputs.rewards is not None, "gvpo needs rewards: fill ClipInputs.rewards"
        total = ops.sequence_sum(ops.log_ratio(inputs), inputs.response_mask)
        size = ops.group_sum(torch.ones_like(total), inputs.group_ids)
        pull = self.beta * (total - ops.group_mean(total, inputs.group_ids))
        gap = inputs.rewards - ops.group_mean(inputs.rewards, inputs.group_ids)
        objective = (
            -(pull - gap).square() * size / (2 * (size - 1).clamp(min=1))
        )  # multiply by the group size, because a mean over responses follows
        ahead = (gap * pull.detach() > 0) & (pull.detach().abs() > gap.abs()) & (inputs.advantages != 0)
        return ClipResult(objective, total.detach(), ahead)


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """Return the rules of this plugin."""
    return [GVPO]
