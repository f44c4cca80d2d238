"""IPO of prime-rl: drops every token whose probability has moved too far from the sampler's, whichever way."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field

from rlzoo import Advantage, ClipInputs, ClipPolicy, ClipResult, Reduction, Width, hookimpl, ops


class IPO(ClipPolicy):
    """Drops a token whose probability has moved too far from the sampler's, whatever the sign of its advantage.

    Formula:
        J = mean over the step's tokens of M_t r_t A,   r_t = pi_t / pi_rollout_t
        M_t = 1 where |pi_t - pi_rollout_t| <= eps, else 0

    Where:
        pi_rollout is the sampler's probability, or pi_old where the sampler gave none. A = R - mean of the rewards R in
        the group.

    Differences from GRPO:
        The bound is on the probability, not on the ratio, and a token is dropped on both sides: also where its advantage
        pushes it back. No division by std; mean over all tokens.

    Reference:
        The loss of prime-rl (github.com/PrimeIntellect-ai/prime-rl), which has no paper; eps 0.3 is its default since
        September 2026. The released code also has a penalty on the squared log-ratio, which is off by default.
    """

    name = "ipo"
    paper = "github.com/PrimeIntellect-ai/prime-rl"
    scope = "token"
    ratio_to_sampler = True
    watch: ClassVar = {
        "clip/fraction": "the share of tokens whose probability moved by more than eps; they learn nothing, even backwards",
        "ratio/log_ratio_max": "not bounded by this rule: a rare token may multiply its probability",
    }
    exempt: ClassVar = {"only_cuts_outward": "a token is dropped wherever its probability moved, also against its advantage"}

    advantage: Advantage = Field("group_mean", description="how the rewards of a group become advantages")
    reduction: Reduction = Field("token_mean", description="how the objective becomes a scalar")
    eps: Annotated[float, Width()] = Field(0.3, gt=0, le=1, description="largest change of a token's probability")

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Drop tokens that moved; shapes as in `ClipInputs`, objective ``(B, T)``."""
        log_ratio, now = ops.log_ratio(inputs, against="rollout"), ops.log_probs(inputs).detach()
        advantages = inputs.advantages.detach().float()
        dropped = (now.exp() - (now - log_ratio.detach()).exp()).abs() > self.eps
        objective = ops.limited_exp(log_ratio) * advantages
        kept = torch.where(dropped, torch.zeros_like(objective), objective)
        return ClipResult(kept, log_ratio.detach(), dropped & (advantages != 0))


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """The policies of this plugin."""
    return [IPO]
