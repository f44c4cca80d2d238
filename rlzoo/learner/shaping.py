"""Shapes rewards with a penalty on overlong responses and a filter for truncated responses."""

from __future__ import annotations

import torch
from torch import Tensor

from rlzoo.config.sections import RewardConfig


def overlong_penalty(lengths: Tensor, max_length: int, settings: RewardConfig) -> Tensor:
    """Compute the soft overlong penalty (arXiv 2503.14476, eq. 13), to be subtracted from the reward.

    The penalty is 0 up to ``max_length - buffer``, grows linearly over the buffer and reaches ``overlong_penalty`` at
    ``max_length``. The buffer is ``overlong_buffer * max_length`` tokens.

    Args:
        lengths: ``(B,)`` response lengths in tokens.
        max_length: maximum length of a response, in tokens.
        settings: the buffer and the size of the penalty.

    Returns:
        float32 ``(B,)``, non-negative.

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
    """Set the advantages of truncated responses to 0 if overlong filtering is on (arXiv 2503.14476).

    Truncated responses still count towards the group's statistics and the step's denominators.
    """
    if not settings.overlong_filtering:
        return advantages
    return torch.where(finished[:, None], advantages, torch.zeros_like(advantages))
