"""Clip-Cov and KL-Cov: restrain the few tokens with the largest covariance between log-probability and advantage."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rlzoo import ClipInputs, ClipPolicy, ClipResult, Reduction, Width, hookimpl, ops


class ClipCov(ClipPolicy):
    """Clips every token as PPO does, and randomly drops a few of the tokens that reduce the entropy most.

    Formula:
        J = mean over the step's tokens of M_t min(r_t A, clip(r_t, 1 - clip_low, 1 + clip_high) A),   r_t = pi_t / pi_old_t
        M_t = 0 for max(1, fraction x tokens) tokens drawn at random among the unclipped ones with cov_low < cov_t < cov_high

    Where:
        cov_t = (A_t - mean A) (log pi_t - mean log pi) with means taken over the step's tokens. The mean of cov_t is the
        covariance between log-probability and advantage, which determines how fast the entropy falls. The random draw
        depends on the step's seed.

    Differences from GRPO:
        The objective has an additional mask M, and the mean is over all tokens.

    Reference:
        The Entropy Mechanism of Reinforcement Learning, arXiv 2505.22617, with a fraction of 2e-4 and bounds of 1 and 5, as
        in the paper.
    """

    name = "clip-cov"
    paper = "arXiv 2505.22617"
    scope = "batch"
    watch: ClassVar = {
        "learner/entropy": "the rule should keep it high",
        "clip/fraction": "the share that grpo would clip, plus the dropped tokens",
    }
    exempt: ClassVar = {
        "ratio_one_is_reinforce": "tokens are dropped at ratio 1 too",
        "only_cuts_outward": "tokens are dropped by their covariance, in whichever direction they moved",
    }

    reduction: Reduction = Field("token_mean", description="how the objective is reduced to a scalar")
    clip_low: Annotated[float, Width()] = Field(0.2, gt=0, lt=1, description="the ratio stays above 1 - clip_low where A < 0")
    clip_high: Annotated[float, Width()] = Field(
        0.2, gt=0, le=100, description="the ratio stays below 1 + clip_high where A > 0"
    )
    fraction: float = Field(2e-4, gt=0, le=1, description="share of the step's tokens to drop; at least one token")
    cov_low: float = Field(1.0, ge=-1e6, le=1e6, description="only tokens with a covariance above this are dropped")
    cov_high: float = Field(5.0, ge=-1e6, le=1e6, description="only tokens with a covariance below this are dropped")

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Clip and drop tokens in the step and return a ``(B, T)`` objective."""
        log_ratio = ops.log_ratio(inputs)
        band = ops.ratio_band(self.clip_low, self.clip_high, None, like=log_ratio)
        result = ops.clipped_surrogate(log_ratio, inputs.advantages, band)
        cov = covariance(inputs)
        candidates = (cov > self.cov_low) & (cov < self.cov_high) & (inputs.advantages != 0) & ~result.clipped
        candidates = candidates & inputs.response_mask
        places = candidates.nonzero()[cov[candidates].argsort()]  # sort, so that the order of the rows does not matter
        rng = torch.Generator().manual_seed(inputs.seed)
        number = max(1, int(self.fraction * int(inputs.response_mask.sum())))
        chosen = places[torch.randperm(len(places), generator=rng)[:number].to(places.device)]
        dropped = torch.zeros_like(inputs.response_mask).index_put((chosen[:, 0], chosen[:, 1]), torch.tensor(True))
        objective = torch.where(dropped, torch.zeros_like(result.objective), result.objective)
        return dataclasses.replace(result, objective=objective, clipped=result.clipped | dropped)


class KLCov(ClipPolicy):
    """Penalises the few tokens that reduce the entropy most. The other tokens are neither penalised nor clipped.

    Formula:
        J = mean over the step's tokens of r_t A - [t in K] kl_coef |log r_t|,   r_t = pi_t / pi_old_t
        K = the max(1, fraction x tokens) tokens of the step with the largest cov_t; tied tokens are all in or all out

    Where:
        cov_t is defined as in `clip-cov`. A penalised token counts as clipped if its probability has changed.

    Differences from GRPO:
        There is no clip. The few tokens in K are pulled back towards their old probability, regardless of their advantage. The
        mean is over all tokens.

    Reference:
        The Entropy Mechanism of Reinforcement Learning, arXiv 2505.22617, with a fraction of 2e-3 as in its 7B runs (2e-4
        for 32B) and a coefficient of 1.
    """

    name = "kl-cov"
    paper = "arXiv 2505.22617"
    scope = "batch"
    learns_without_advantages = True
    watch: ClassVar = {
        "learner/entropy": "the rule should keep it high",
        "clip/fraction": "the share of penalised tokens that have moved",
        "ratio/log_ratio_max": "not bounded by a clip",
    }
    exempt: ClassVar = {
        "zero_advantage_zero_gradient": "a penalised token is pulled back whatever its advantage",
        "clipped_means_no_gradient": "a penalised token is pulled back, not cut",
    }

    reduction: Reduction = Field("token_mean", description="how the objective is reduced to a scalar")
    fraction: float = Field(2e-3, gt=0, le=1, description="share of the step's tokens to penalise; at least one token")
    kl_coef: float = Field(1.0, ge=0, le=1e6, description="weight of the penalty on |log r|")

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Penalise tokens in the step and return a ``(B, T)`` objective."""
        log_ratio, mask = ops.log_ratio(inputs), inputs.response_mask
        cov = torch.where(mask, covariance(inputs), -torch.inf)
        number = (self.fraction * mask.sum()).long().clamp(min=1)
        beyond = torch.cat([cov.flatten().sort(descending=True).values, cov.new_full((1,), -torch.inf)])
        penalised = mask & (
            cov > beyond.gather(0, number[None])
        )  # tokens with equal covariance are all penalised or all left out, so that at most ``number`` tokens are penalised
        objective = ops.limited_exp(log_ratio) * inputs.advantages.detach().float()
        objective = objective - torch.where(penalised, self.kl_coef * log_ratio.abs(), 0.0)
        moved = penalised & (inputs.advantages != 0) & (log_ratio.detach() != 0)
        return ClipResult(objective, log_ratio.detach(), moved)


def covariance(inputs: ClipInputs) -> Tensor:
    """Compute detached ``(A - mean A) (log pi - mean log pi)``, ``(B, T)``, with means over the step's response tokens.

    The result is in float64 so that equal advantages differ from their mean by exactly 0.
    """
    log_probs, mask = ops.log_probs(inputs).detach().double(), inputs.response_mask
    advantages = inputs.advantages.detach().double().expand_as(log_probs)
    return (advantages - ops.step_mean(advantages, mask)) * (log_probs - ops.step_mean(log_probs, mask))


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """Return the rules of this plugin."""
    return [ClipCov, KLCov]
