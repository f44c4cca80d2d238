"""REAL: classifies the responses of a group by their mean log-ratio, with rewards as labels."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field

from rlzoo import Advantage, ClipInputs, ClipPolicy, ClipResult, hookimpl, ops


class REAL(ClipPolicy):
    """Treats rewards as labels and raises the mean log-ratio of a prompt's good responses above that of its bad ones.

    Formula:
        J = mean over prompts of -log(1 + sum_{i good} exp(-s_i / tau)) - log(1 + sum_{j bad} exp(s_j / tau))
        s_i = mean_t log(pi_t / pi_old_t)

    Where:
        A response is good if its reward is above `threshold`. Prompts that lack good or bad responses contribute 0 but count
        in the mean.

    Differences from GRPO:
        A classification loss replaces the advantage. The weight of a response's gradient is a softmax of its score and is
        at most 1 / tau. It is largest for misclassified responses, smaller for well-classified responses, and never cut off.

    Reference:
        Rewards as Labels, arXiv 2602.05630, with a tau of 0.5 as in the released script. The released code treats responses
        with a reward of exactly 1 as good and responses with a reward of exactly 0 as bad. The threshold is an rlzoo
        addition.
    """

    name = "real"
    paper = "arXiv 2602.05630"
    scope = "batch"
    needs: ClassVar = frozenset({"group_ids", "rewards"})
    learns_without_advantages = True
    watch: ClassVar = {
        "ratio/mu_token": "the mean score, which may differ from 0",
        "ratio/sigma_token": "in units of tau, how far responses are separated; weights are small if this is above 1",
    }
    exempt: ClassVar = {
        "advantages_scale_the_gradient": "the rule uses rewards instead of advantages",
        "zero_advantage_zero_gradient": "the rule uses rewards instead of advantages",
        "clipped_means_no_gradient": "weights decrease and are never cut",
    }

    advantage: Advantage = Field(
        "group_mean", description="how a group's rewards become advantages; the formula does not use them"
    )
    reduction: Literal["sequence_mean", "sequence_mean_token_sum", "constant_length"] = Field(
        "sequence_mean", description="how the objective is reduced to a scalar"
    )
    tau: float = Field(0.5, ge=1e-3, le=1e3, description="temperature: mean log-ratio at which a weight starts to decrease")
    threshold: float = Field(0.5, ge=-1e6, le=1e6, description="responses with a larger reward are good, all others bad")

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Classify each group and return a ``(B, 1)`` objective, in which every response gets the J of its prompt."""
        assert inputs.group_ids is not None, "real needs group_ids: fill ClipInputs.group_ids"
        assert inputs.rewards is not None, "real needs rewards: fill ClipInputs.rewards"
        score = ops.sequence_mean(ops.log_ratio(inputs), inputs.response_mask)
        present = inputs.response_mask.any(dim=-1, keepdim=True)
        together = (inputs.group_ids == inputs.group_ids.T) & present.T
        good = inputs.rewards > self.threshold
        losses, both = torch.zeros_like(score), torch.ones_like(good)
        for kind, sign in ((good, -1.0), (~good, 1.0)):
            others = together & kind.T
            scores = torch.where(others, sign * score.T / self.tau, -torch.inf)
            losses = losses + torch.cat([torch.zeros_like(score), scores], dim=-1).logsumexp(dim=-1, keepdim=True)
            both = both & others.any(dim=-1, keepdim=True)
        objective = torch.where(both, -losses, torch.zeros_like(losses))
        return ClipResult(objective, score.detach(), torch.zeros_like(good))


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """Return the rules of this plugin."""
    return [REAL]
