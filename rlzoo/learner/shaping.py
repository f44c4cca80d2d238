"""Reward shaping: the penalty on overlong responses, the filter on truncated ones, and the KL inside the reward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlzoo.config.sections import RewardConfig

if TYPE_CHECKING:
    from rlzoo.learner.batch import ScoredBatch


def overlong_penalty(lengths: Tensor, max_length: int, settings: RewardConfig) -> Tensor:
    """The soft penalty on length (arXiv 2503.14476, eq. 13), as the amount to take off the reward.

    It is 0 up to ``max_length - buffer``, grows linearly over the buffer and reaches ``overlong_penalty`` at ``max_length``;
    the buffer is ``overlong_buffer * max_length`` tokens.

    Args:
        lengths: ``(B,)`` response lengths in tokens.
        max_length: length limit of a response, in tokens.
        settings: the buffer and the size of the penalty.

    Returns:
        float32 ``(B,)``, not negative.

    Example:
        >>> half = RewardConfig(overlong_buffer=0.5, overlong_penalty=2.0)
        >>> overlong_penalty(torch.tensor([4, 5, 6, 8]), 8, half).tolist()  # over the last 4 of 8 tokens
        [0.0, 0.5, 1.0, 2.0]
    """
    buffer = settings.overlong_buffer * max_length
    if buffer == 0:
        return torch.zeros(lengths.shape)
    return ((lengths - (max_length - buffer)) / buffer).clamp(0, 1) * settings.overlong_penalty


def without_truncated(advantages: Tensor, finished: Tensor, settings: RewardConfig) -> Tensor:
    """Advantages with 0 for truncated responses, if those are filtered (overlong filtering, arXiv 2503.14476).

    The group's statistics have been taken with them in, and they stay in the step's denominators.
    """
    if not settings.overlong_filtering:
        return advantages
    return torch.where(finished[:, None], advantages, torch.zeros_like(advantages))


def token_kl(batch: ScoredBatch) -> Tensor:
    """The estimate k1 of the KL to the starting model, ``log pi_old - log pi_ref`` of each token drawn, ``(B, T)``."""
    assert batch.ref_log_probs is not None, "the learner keeps a reference where the reward has a KL"
    return batch.old_log_probs - batch.ref_log_probs


def reward_metrics(batch: ScoredBatch, settings: RewardConfig) -> dict[str, float]:
    """What shaping did to the rewards of one step, by its MLflow names; nothing for rewards that are not shaped."""
    metrics = {}
    if settings.overlong_buffer > 0:
        metrics["reward/shaped_mean"] = float(batch.rewards.double().mean())
    if settings.kl_coef > 0:
        metrics["reward/kl"] = float(token_kl(batch)[batch.response_mask].double().mean())
    return metrics
