"""BAPO: widens GRPO's band step by step until tokens with A > 0 reach a target share of the objective."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from pydantic import Field

from rlzoo import ClipBand, ClipInputs, ClipPolicy, ClipResult, Reduction, hookimpl, ops


class BAPO(ClipPolicy):
    """Clips token ratios to a band that is chosen in each update to give tokens with A > 0 a target share of the objective.

    Formula:
        J = mean over the step's tokens of min(r_t A, clip(r_t, c_low, c_high) A),   r_t = pi_t / pi_old_t
        (c_low, c_high) = the first of (low_first, high_first), (low_first, high_first + high_step), ...,
        (low_first, high_last), (low_first + low_step, high_last), ..., (low_last, high_last) with share >= `share`, or the last
        share = sum_{A > 0} pi_rollout_t min(r_t, c_high) |A| / sum pi_rollout_t |min(r_t A, clip(r_t, c_low, c_high) A)|

    Where:
        Sums run over all tokens in the step. pi_rollout is the sampler's probability, or pi_old if the sampler reported
        none. A = (R - mean) / std, with the mean and std of the rewards R in the group.

    Differences from GRPO:
        The ceiling for tokens with A > 0 is high and adaptive, because tokens with A < 0 would otherwise dominate early in
        training. Once the ceiling is at its maximum, the floor rises and drops more tokens with A < 0. The mean is over
        all tokens.

    Reference:
        Balanced Policy Optimization, arXiv 2510.18927, with a share of 0.4, floors from 0.6 to 0.9 in steps of 0.02, and
        ceilings from 1.2 to 3.0 in steps of 0.05. The released code differs: it has a dual clip, computes the share without
        pi_rollout, moves the floor first, and searches each micro-batch.
    """

    name = "bapo"
    paper = "arXiv 2510.18927"
    scope = "batch"
    watch: ClassVar = {
        "clip/fraction_high": "tokens with A > 0 above the ceiling; falls when the ceiling rises",
        "clip/fraction_low": "tokens with A < 0 below the floor; rises when the floor rises",
        "learner/entropy": "should stay high, because the model learns from rare tokens with A > 0",
    }

    reduction: Reduction = Field("token_mean", description="how the objective is reduced to a scalar")
    share: float = Field(0.4, gt=0, lt=1, description="target share of the objective for tokens with A > 0")
    low_first: float = Field(0.6, gt=0, lt=1, description="smallest floor of the ratio where A < 0")
    low_last: float = Field(0.9, gt=0, lt=1, description="largest floor")
    low_step: float = Field(0.02, ge=1e-3, le=1, description="step of the floor")
    high_first: float = Field(1.2, gt=1, le=100, description="smallest ceiling of the ratio where A > 0")
    high_last: float = Field(3.0, gt=1, le=100, description="largest ceiling")
    high_step: float = Field(0.05, ge=1e-3, le=100, description="step of the ceiling")

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Clip within the chosen band and return a ``(B, T)`` objective."""
        log_ratio, advantages = ops.log_ratio(inputs), inputs.advantages.detach().float()
        ratio, now = ops.limited_exp(log_ratio.detach()).double(), ops.log_probs(inputs).detach()
        sampled = (now - ops.log_ratio(inputs, against="rollout").detach()).exp()
        weight = torch.where(inputs.response_mask, sampled * advantages.abs().double(), 0.0)
        good, bad = torch.where(advantages > 0, weight, 0.0), torch.where(advantages < 0, weight, 0.0)
        pairs = self.pairs()
        gain = torch.stack([(good * ratio.clamp(max=high)).sum() for _, high in pairs])
        total = gain + torch.stack([(bad * ratio.clamp(min=low)).sum() for low, _ in pairs])
        shares = torch.where(total > 0, gain / total, 1.0)
        enough = (shares >= self.share).long()
        enough[-1] = 1
        first = enough.argmax(dim=0, keepdim=True)
        low, high = torch.tensor(pairs, device=ratio.device).index_select(0, first)[0].unbind()
        chosen = {"bound_low": low, "bound_high": high, "positive_share": shares.index_select(0, first)[0].float()}
        result = ops.clipped_surrogate(log_ratio, advantages, ClipBand(low.log(), high.log()))
        metrics = {name: value.expand(len(ratio), 1) for name, value in chosen.items()}
        return ClipResult(result.objective, result.log_ratio, result.clipped, result.band, metrics)

    def pairs(self) -> list[tuple[float, float]]:
        """Return the (floor, ceiling) pairs in the order in which they are tried. The ceiling moves first."""
        lows = grid(self.low_first, self.low_last, self.low_step)
        highs = grid(self.high_first, self.high_last, self.high_step)
        return [(lows[0], high) for high in highs] + [(low, highs[-1]) for low in lows[1:]]


def grid(first: float, last: float, step: float) -> list[float]:
    """Return the numbers from ``first`` to ``last`` in steps of ``step``, or only ``first`` if ``last`` is not above it."""
    number = max(0, math.ceil((last - first) / step - 1e-9))
    return [min(first + index * step, last) if index else first for index in range(number + 1)]


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """Return the rules of this plugin."""
    return [BAPO]
