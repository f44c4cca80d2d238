"""CPPO: a trust region on the divergence of each token, with a budget for the divergence of its prefix."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field

from rlzoo import ClipInputs, ClipPolicy, ClipResult, Reduction, Width, hookimpl, ops


class CPPO(ClipPolicy):
    """Drops a token whose probability has moved too far, given a limit for each token and a budget for its prefix.

    Formula:
        J = sum over the step's tokens of M_t r_t A / (responses x max_length),   r_t = pi_t / pi_rollout_t
        M_t = 1 where A (r_t - 1) <= 0 or w_t D_t <= c_t, else 0;   D_t = |pi_t - pi_rollout_t|
        c_t = min(delta, delta + b W_{t-1} - S_{t-1}),   S_t = sum_{k <= t} w_k D_k,   W_t = sum_{k <= t} w_k
        w_t = 1 - (1 - weight_last) (t - 1) / (T - 1),   b = clip(the `quantile` of D_1..D_T, budget, 2 budget)

    Where:
        t = 1..T counts the model's tokens, and S_0 = W_0 = 0. pi_rollout is the sampler's probability, or pi_old if the
        sampler reported none. S and W include dropped tokens. If `quantile` is null, b = budget.

    Differences from GRPO:
        The bound is on the probability instead of the ratio. It becomes tighter if the prefix has drifted by more than b per
        token on average, and looser towards the end of a response.

    Reference:
        Cumulative Prefix-divergence Policy Optimization, arXiv 2606.10968, equations 8 to 11 and 22, with a delta of 0.15, a
        weight_last of 0.8, and a budget of 0.02 with the quantile (base models) or 0.015 without it (other models). The
        paper sums over tokens, and the constant denominator is an rlzoo addition. The released code uses the quantile for
        every model.
    """

    name = "cppo"
    paper = "arXiv 2606.10968"
    scope = "token"
    ratio_to_sampler = True
    watch: ClassVar = {
        "clip/fraction": "the share of tokens that were dropped",
        "clip/fraction_length_bin_<k>": "if this rises with length, the prefix budget is the active limit rather than delta",
    }

    reduction: Reduction = Field("constant_length", description="how the objective is reduced to a scalar")
    delta: Annotated[float, Width()] = Field(0.15, gt=0, le=1, description="largest weighted divergence of a token")
    budget: Annotated[float, Width()] = Field(
        0.02, gt=0, le=1, description="mean divergence of the prefix above which the limit of the next token shrinks"
    )
    quantile: float | None = Field(
        0.9,
        ge=0,
        le=1,
        description="quantile of the response's divergences that sets its budget, up to twice `budget`; null to use `budget`",
    )
    weight_last: float = Field(0.8, ge=0, le=1, description="weight of the last token's divergence; the first token's is 1")

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Drop tokens outside the trust region and return a ``(B, T)`` objective."""
        mask, advantages = inputs.response_mask, inputs.advantages.detach().float()
        log_ratio, now = ops.log_ratio(inputs, against="rollout"), ops.log_probs(inputs).detach()
        moved = (now.exp() - (now - log_ratio.detach()).exp()).abs()
        budget: float | torch.Tensor = self.budget
        if self.quantile is not None:
            quantile = moved.masked_fill(~mask, torch.nan).nanquantile(self.quantile, dim=-1, keepdim=True)
            budget = quantile.clamp(self.budget, 2 * self.budget)
        share = (ops.positions(mask) - 1) / (ops.lengths(mask) - 1).clamp(min=1)
        weight = 1 - (1 - self.weight_last) * share
        spent = ops.prefix_sum(weight * moved, mask) - weight * moved
        allowed = budget * (ops.prefix_sum(weight, mask) - weight)
        room = (self.delta + allowed - spent).clamp(max=self.delta)
        dropped = mask & (advantages * log_ratio.detach() > 0) & (weight * moved > room)
        objective = ops.limited_exp(log_ratio) * advantages
        return ClipResult(torch.where(dropped, torch.zeros_like(objective), objective), log_ratio.detach(), dropped)


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """Return the rules of this plugin."""
    return [CPPO]
