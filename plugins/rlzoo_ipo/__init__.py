"""IPO of prime-rl: drops every token whose probability has moved too far from the sampler's in either direction."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field

from rlzoo import Advantage, ClipInputs, ClipPolicy, ClipResult, Reduction, Width, hookimpl, ops


class IPO(ClipPolicy):
    """Drops every token whose probability has moved too far from the sampler's, regardless of the sign of its advantage.

    Formula:
        J = mean over the step's tokens of M_t r_t A,   r_t = pi_t / pi_rollout_t
        M_t = 1 where |pi_t - pi_rollout_t| <= eps, else 0

    Where:
        pi_rollout is the sampler's probability, or pi_old if the sampler reported none. A = R - mean of the rewards R in the
        group.

    Differences from GRPO:
        The bound is on the probability instead of the ratio. A token is dropped whether its probability rose or fell, even
        if its advantage would reverse the change. Advantages are not divided by std, and the mean is over all tokens.

    Reference:
        The loss of prime-rl (github.com/PrimeIntellect-ai/prime-rl), which has no paper. Its default for eps has been 0.3
        since September 2026. The released code also has a penalty on the squared log-ratio, which is off by default.
    """

    name = "ipo"
    paper = "github.com/PrimeIntellect-ai/prime-rl"
    scope = "token"
    ratio_to_sampler = True
    watch: ClassVar = {
        "clip/fraction": "the share of tokens whose probability moved by more than eps; they have no gradient",
        "ratio/log_ratio_max": "not bounded by this rule, because the probability of a rare token may grow many times over",
    }
    exempt: ClassVar = {"only_cuts_outward": "a token is dropped even if its probability moved against its advantage"}

    advantage: Advantage = Field("group_mean", description="how a group's rewards become advantages")
    reduction: Reduction = Field("token_mean", description="how the objective is reduced to a scalar")
    eps: Annotated[float, Width()] = Field(0.3, gt=0, le=1, description="largest change of a token's probability")

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Drop tokens whose probability moved too far and return a ``(B, T)`` objective."""
        log_ratio, now = ops.log_ratio(inputs, against="rollout"), ops.log_probs(inputs).detach()
        advantages = inputs.advantages.detach().float()
        dropped = (now.exp() - (now - log_ratio.detach()).exp()).abs() > self.eps
        objective = ops.limited_exp(log_ratio) * advantages
        kept = torch.where(dropped, torch.zeros_like(objective), objective)
        return ClipResult(kept, log_ratio.detach(), dropped & (advantages != 0))


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """Return the rules of this plugin."""
    return [IPO]
