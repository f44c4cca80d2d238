"""OPSM: off-policy sequence masking, which drops wrong responses from which the policy has moved away."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from rlzoo import ClipInputs, ClipPolicy, ClipResult, Width, hookimpl, ops


class OPSM(ClipPolicy):
    """Clips every token as PPO does, and drops a response with a negative advantage if it has become too unlikely.

    Formula:
        J = mean over responses of M mean_t min(r_t A, clip(r_t, 1 - clip_low, 1 + clip_high) A),   r_t = pi_t / pi_old_t
        M = 0 where A < 0 and mean_t log(pi_rollout_t / pi_t) > delta, else 1

    Where:
        pi_rollout is the sampler's probability, or pi_old if the sampler reported none. The mask therefore also depends on
        the mismatch between sampler and trainer.

    Differences from GRPO:
        The objective has an additional mask M. A response with a positive advantage is never dropped.

    Reference:
        DeepSeek-V3.2, arXiv 2512.02556. The paper does not state delta. The starting point in TRL's documentation is 0.5.
    """

    name = "opsm"
    paper = "arXiv 2512.02556"
    scope = "token"
    watch: ClassVar = {
        "clip/fraction_low": "includes all tokens of dropped responses",
        "ratio/log_ratio_min": "the log-ratio of the most suppressed token",
    }

    clip_low: Annotated[float, Width()] = Field(0.2, gt=0, lt=1, description="the ratio stays above 1 - clip_low where A < 0")
    clip_high: Annotated[float, Width()] = Field(
        0.2, gt=0, le=100, description="the ratio stays below 1 + clip_high where A > 0"
    )
    delta: Annotated[float, Width()] = Field(
        0.5, gt=0, le=20, description="a response with A < 0 is dropped if its mean token log-ratio is below -delta"
    )

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Clip each token, drop responses, and return a ``(B, T)`` objective."""
        log_ratio = ops.log_ratio(inputs)
        band = ops.ratio_band(self.clip_low, self.clip_high, None, like=log_ratio)
        result = ops.clipped_surrogate(log_ratio, inputs.advantages, band)
        moved = ops.sequence_mean(ops.log_ratio(inputs, against="rollout").detach(), inputs.response_mask)
        dropped = (inputs.advantages < 0) & (moved < -self.delta)
        objective = torch.where(dropped, torch.zeros_like(result.objective), result.objective)
        return dataclasses.replace(result, objective=objective, clipped=result.clipped | dropped)


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """Return the rules of this plugin."""
    return [OPSM]
