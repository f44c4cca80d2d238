"""GPG: the plain policy gradient with group advantages and without an importance ratio."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from rlzoo import Advantage, ClipInputs, ClipPolicy, ClipResult, Reduction, hookimpl, ops


class GPG(ClipPolicy):
    """Maximises each token's log-probability times its advantage, without an importance ratio or a clip.

    Formula:
        J = mean over the step's tokens of A log pi_t

    Where:
        A = R - mean of the rewards R in the group.

    Differences from GRPO:
        There is no ratio, no clip and no division by std, and the mean is over all tokens. After the first update on a
        rollout batch, the data is off-policy, and the gradient is not corrected.

    Reference:
        Group Policy Gradient, arXiv 2504.02546. The paper's correction for groups without a signal is omitted, because it
        scales the whole step, as the learning rate does.
    """

    name = "gpg"
    paper = "arXiv 2504.02546"
    scope = "token"
    watch: ClassVar = {
        "ratio/sigma_token": "how far off-policy the data is; this rule does not correct for it",
        "learner/entropy": "falls if many updates are taken on one rollout batch",
    }
    exempt: ClassVar = {"clipped_means_no_gradient": "nothing is clipped"}

    advantage: Advantage = Field("group_mean", description="how a group's rewards become advantages")
    reduction: Reduction = Field("token_mean", description="how the objective is reduced to a scalar")

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Weight each token's log-probability and return a ``(B, T)`` objective."""
        log_ratio = ops.log_ratio(inputs).detach()
        objective = inputs.advantages.detach().float() * ops.log_probs(inputs)
        return ClipResult(objective, log_ratio, torch.zeros_like(log_ratio, dtype=torch.bool))


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """Return the rules of this plugin."""
    return [GPG]
