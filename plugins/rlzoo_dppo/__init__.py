"""DPPO: a trust region on the divergence of a token's probability instead of a band on its ratio."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from rlzoo import Advantage, ClipInputs, ClipPolicy, ClipResult, Reduction, Width, hookimpl, ops

FLOOR = 1e-8  # lower bound on 1 - probability before its logarithm is taken


class TrustRegion(ClipPolicy):
    """Base class of both rules."""

    paper = "arXiv 2602.04879"
    scope = "token"
    ratio_to_sampler = True

    advantage: Advantage = "group_mean"
    reduction: Reduction = "constant_length"
    ratio_cap: float | None = Field(20.0, ge=1, le=1e6, description="largest weight of a token; null for no cap below exp(20)")

    def weighted(self, inputs: ClipInputs, divergence: Tensor, delta_low: float, delta_high: float) -> ClipResult:
        """Weight ``A log pi`` by the capped ratio, and drop tokens whose ``(B, T)`` divergence is too large and would grow."""
        log_ratio, advantages = ops.log_ratio(inputs, against="rollout").detach(), inputs.advantages.detach().float()
        above = (advantages > 0) & (log_ratio > 0) & (divergence > delta_high)
        below = (advantages < 0) & (log_ratio < 0) & (divergence > delta_low)
        weight = ops.limited_exp(log_ratio).clamp(max=self.ratio_cap or math.inf).masked_fill(above | below, 0.0)
        return ClipResult(weight * advantages * ops.log_probs(inputs), log_ratio, above | below)


class DPPOTV(TrustRegion):
    """Drops a token whose probability has moved too far in the direction of its advantage, as measured by total variation.

    Formula:
        J = sum over the step's tokens of M_t sg[min(r_t, ratio_cap)] A log pi_t / (responses x max_length)
        M_t = 0 where A > 0, r_t > 1, D_t > delta_high, or where A < 0, r_t < 1, D_t > delta_low; else 1
        r_t = pi_t / pi_rollout_t,   D_t = |pi_t - pi_rollout_t|

    Where:
        pi_rollout is the sampler's probability (the behaviour policy), or pi_old if the sampler reported none. sg[.] stops
        the gradient. D_t is the total variation between the two policies on the binary event "this token or another".

    Differences from GRPO:
        A rare token may double its probability, which GRPO's band forbids. The probability of a frequent token may not move
        by more than 0.15, which GRPO's band allows. As the authors advise, advantages are not divided by std, and the
        denominator is constant.

    Reference:
        Rethinking the Trust Region in LLM Reinforcement Learning, arXiv 2602.04879, with a delta of 0.15 as in its published
        scripts and the cap of 20 that is the default of verl's loss function.
    """

    name = "dppo-tv"
    watch: ClassVar = {
        "clip/fraction": "the share of tokens whose probability moved by more than delta",
        "ratio/log_ratio_max": "the cap is active if this is above log(ratio_cap)",
    }

    delta_low: Annotated[float, Width()] = Field(0.15, gt=0, le=1, description="largest decrease of a probability where A < 0")
    delta_high: Annotated[float, Width()] = Field(0.15, gt=0, le=1, description="largest increase of a probability where A > 0")

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Drop tokens outside the trust region and return a ``(B, T)`` objective."""
        now, before = probabilities(inputs)
        return self.weighted(inputs, (now - before).abs(), self.delta_low, self.delta_high)


class DPPOKL(TrustRegion):
    """Drops a token whose probability has moved too far in the direction of its advantage, as measured by KL divergence.

    Formula:
        As in `dppo-tv`, with q = pi_rollout_t, p = pi_t and
        D_t = q log(q / p) + (1 - q) log((1 - q) / (1 - p))

    Where:
        D_t is the KL divergence between the two policies on the binary event "this token or another", in nats.

    Differences from GRPO:
        The same as for `dppo-tv`.

    Reference:
        Rethinking the Trust Region in LLM Reinforcement Learning, arXiv 2602.04879, with a delta of 0.05 as in its published
        scripts and the cap of 20 that is the default of verl's loss function.
    """

    name = "dppo-kl"
    watch: ClassVar = {
        "clip/fraction": "the share of tokens whose divergence is above delta",
        "ratio/log_ratio_max": "the cap is active if this is above log(ratio_cap)",
    }

    delta_low: Annotated[float, Width()] = Field(
        0.05, gt=0, le=100, description="largest divergence due to a decrease where A < 0, in nats"
    )
    delta_high: Annotated[float, Width()] = Field(
        0.05, gt=0, le=100, description="largest divergence due to an increase where A > 0, in nats"
    )

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Drop tokens outside the trust region and return a ``(B, T)`` objective."""
        now, before = probabilities(inputs)
        other_now, other_before = (1 - now).clamp(min=FLOOR), (1 - before).clamp(min=FLOOR)
        log_ratio = ops.log_ratio(inputs, against="rollout").detach()
        divergence = (1 - before) * (other_before / other_now).log() - before * log_ratio
        return self.weighted(inputs, divergence, self.delta_low, self.delta_high)


def probabilities(inputs: ClipInputs) -> tuple[Tensor, Tensor]:
    """Return each token's probability under the model and the sampler, detached, ``(B, T)`` each, with 1 where masked."""
    now = ops.log_probs(inputs).detach()
    return now.exp(), (now - ops.log_ratio(inputs, against="rollout").detach()).exp()


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """Return the rules of this plugin."""
    return [DPPOTV, DPPOKL]
