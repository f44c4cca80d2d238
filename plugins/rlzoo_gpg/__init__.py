"""GPG: the plain policy gradient with group advantages, without a ratio."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from rlzoo import Advantage, ClipInputs, ClipPolicy, ClipResult, Reduction, hookimpl, ops


class GPG(ClipPolicy):
    """Follows the log-probability of every token times its advantage; there is no importance ratio and no clip.

    Formula:
        J = mean over the step's tokens of A log pi_t

    Where:
        A = R - mean of the rewards R in the group.

    Differences from GRPO:
        No ratio, no clip, no division by std; the mean is over all tokens. After the first update of a rollout batch the
        gradient is that of data the policy no longer samples.

    Reference:
        Group Policy Gradient, arXiv 2504.02546. Its correction for groups without a signal, a factor on the whole step,
        is left to the learning rate.
    """

    name = "gpg"
    paper = "arXiv 2504.02546"
    scope = "token"
    watch: ClassVar = {
        "ratio/sigma_token": "how far off policy the data is; nothing in this rule corrects for it",
        "learner/entropy": "falls where many updates are taken on one rollout batch",
    }
    exempt: ClassVar = {"clipped_means_no_gradient": "nothing is ever clipped"}

    advantage: Advantage = Field("group_mean", description="how the rewards of a group become advantages")
    reduction: Reduction = Field("token_mean", description="how the objective becomes a scalar")

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Weigh each token's log-probability; shapes as in `ClipInputs`, objective ``(B, T)``."""
        log_ratio = ops.log_ratio(inputs).detach()
        objective = inputs.advantages.detach().float() * ops.log_probs(inputs)
        return ClipResult(objective, log_ratio, torch.zeros_like(log_ratio, dtype=torch.bool))


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """The policies of this plugin."""
    return [GPG]
