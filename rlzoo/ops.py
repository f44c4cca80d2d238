"""Pure tensor functions on token log-ratios: the vocabulary clip policies are written in.

Shapes: B responses, T response tokens. A value per response is a ``(B, 1)`` column. Log-ratios are natural logarithms.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch

from rlzoo.types import ClipBand, ClipInputs, ClipResult

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Largest log-ratio, of either sign, that is exponentiated. exp(20) = 4.9e8 is outside any band in use."""


def log_probs(inputs: ClipInputs) -> Tensor:
    """Log-probabilities of the current policy, float32 ``(B, T)``, exactly 0 where masked; carries the gradient."""
    return _visible(inputs.log_probs, inputs.response_mask)


def log_ratio(inputs: ClipInputs, against: Literal["old", "rollout"] = "old") -> Tensor:
    """Log-ratio per token, float32 ``(B, T)``: ``log pi - log pi_old`` on response tokens, exactly 0 elsewhere.

    Masked positions are replaced before the subtraction, so whatever is there (NaN, infinity) reaches neither the
    value nor the gradient.

    Args:
        inputs: what the policy was given.
        against: the denominator; ``"rollout"`` is the sampler's own log-probabilities, or the old ones where it gave none.
    """
    reported = inputs.rollout_log_probs if against == "rollout" else None
    denominator = inputs.old_log_probs if reported is None else reported
    return log_probs(inputs) - _visible(denominator.detach(), inputs.response_mask)


def _visible(values: Tensor, response_mask: Tensor) -> Tensor:
    return torch.where(response_mask, values.float(), torch.zeros((), device=values.device))


def limited_exp(log_ratio: Tensor) -> Tensor:
    """``exp`` of a log-ratio limited to +-`LOG_RATIO_LIMIT`: finite for every number, without gradient beyond the limit."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def lengths(response_mask: Tensor) -> Tensor:
    """Response tokens per row, float32 ``(B, 1)``; a row without any counts as 1, so it can be divided by."""
    return response_mask.sum(dim=-1, keepdim=True).clamp(min=1).float()


def sequence_sum(values: Tensor, response_mask: Tensor) -> Tensor:
    """Sum over a response's tokens, ``(B, T) -> (B, 1)``."""
    return torch.where(response_mask, values, torch.zeros_like(values)).sum(dim=-1, keepdim=True)


def sequence_mean(values: Tensor, response_mask: Tensor) -> Tensor:
    """Mean over a response's tokens, ``(B, T) -> (B, 1)``; 0 for a row without tokens."""
    return sequence_sum(values, response_mask) / lengths(response_mask)


def per_response(values: Tensor, response_mask: Tensor) -> Tensor:
    """``(B, 1)``: a value per response as it is, values per token ``(B, T)`` as their mean over the response's tokens."""
    return values if values.shape[-1] == 1 else sequence_mean(values, response_mask)


def positions(response_mask: Tensor) -> Tensor:
    """Which of the response's tokens each is, float32 ``(B, T)``: 1, 2, ... on the model's tokens, 0 elsewhere."""
    return torch.where(response_mask, response_mask.cumsum(dim=-1), 0).float()


def prefix_sum(values: Tensor, response_mask: Tensor) -> Tensor:
    """Sum over a response's tokens up to and with each, ``(B, T)``; 0 where masked, and masked values do not add to it."""
    inside = torch.where(response_mask, values, torch.zeros_like(values))
    return torch.where(response_mask, inside.cumsum(dim=-1), torch.zeros_like(values))


def turn_sum(values: Tensor, turn_ids: Tensor) -> Tensor:
    """Sum over the tokens of the same turn of a response, ``(B, T)``; 0 on tokens of no turn (``turn_ids`` of -1)."""
    inside, turn = turn_ids >= 0, turn_ids.clamp(min=0)
    zeros = torch.zeros_like(values)
    total = zeros.scatter_add(-1, turn, torch.where(inside, values, zeros))
    return torch.where(inside, total.gather(-1, turn), zeros)


def turn_mean(values: Tensor, turn_ids: Tensor) -> Tensor:
    """Mean over the tokens of the same turn of a response, ``(B, T)``; 0 on tokens of no turn (``turn_ids`` of -1)."""
    return turn_sum(values, turn_ids) / turn_sum(torch.ones_like(values), turn_ids).clamp(min=1)


def group_sum(values: Tensor, group_ids: Tensor) -> Tensor:
    """Sum over the rows of the same group, ``(B, 1) -> (B, 1)``; for rules that need ``group_ids``."""
    index = _numbered(group_ids)
    return torch.zeros_like(values).index_add(0, index, values)[index]


def group_mean(values: Tensor, group_ids: Tensor) -> Tensor:
    """Mean over the rows of the same group, ``(B, 1) -> (B, 1)``; for rules that need ``group_ids``."""
    return group_sum(values, group_ids) / group_sum(torch.ones_like(values), group_ids)


def group_centred(values: Tensor, group_ids: Tensor) -> Tensor:
    """Values less the mean of their group, ``(B, 1)``; exactly 0 where all values of a group are equal."""
    index = _numbered(group_ids)[:, None]
    low = torch.full_like(values, torch.inf).scatter_reduce(0, index, values, "amin").gather(0, index)
    high = torch.full_like(values, -torch.inf).scatter_reduce(0, index, values, "amax").gather(0, index)
    return torch.where(low == high, torch.zeros_like(values), values - group_mean(values, group_ids))


def _numbered(group_ids: Tensor) -> Tensor:
    """Groups ``(B, 1)`` numbered from 0, ``(B,)``, without a shape that depends on how many there are."""
    order = group_ids[:, 0].argsort()
    ascending = group_ids[:, 0][order]
    number = torch.cat([torch.zeros_like(ascending[:1]), (ascending[1:] != ascending[:-1]).long()]).cumsum(0)
    return torch.zeros_like(number).scatter(0, order, number)


def step_mean(values: Tensor, response_mask: Tensor) -> Tensor:
    """Mean over every response token of the step, a scalar; only rules of scope "batch" may look at it."""
    return torch.where(response_mask, values, torch.zeros_like(values)).sum() / response_mask.sum().clamp(min=1)


def clamp_by_advantage(log_ratio: Tensor, advantages: Tensor, band: ClipBand | None) -> tuple[Tensor, Tensor]:
    """Clamp a log-ratio on the side where the advantage would push it further out.

    Ratios are positive and monotone in their logarithm, so ``min(r A, clip(r) A)`` equals ``exp(clamped) A`` with
    ``clamped = min(log_ratio, high)`` where A > 0 and ``max(log_ratio, low)`` where A < 0, in value and in gradient; and
    it stays finite where ``exp`` would overflow. A dual-clip ceiling (arXiv 1912.09729) caps it where A < 0 as well.

    Args:
        log_ratio: ``(B, T)`` or ``(B, 1)``.
        advantages: broadcasts against ``log_ratio``.
        band: its edges, or None for a rule that does not clip.

    Returns:
        The clamped log-ratio, limited to +-`LOG_RATIO_LIMIT` whatever the advantage, and a bool tensor of the same shape:
        where the band (not that limit) cut the gradient.
    """
    clamped, clipped = log_ratio, torch.zeros_like(log_ratio, dtype=torch.bool)
    if band is not None:
        above = (advantages > 0) & (log_ratio > band.high)
        below = (advantages < 0) & (log_ratio < band.low)
        clamped = torch.where(above, band.high, torch.where(below, band.low, log_ratio))
        clipped = above | below
        if band.ceiling is not None:
            over = (advantages < 0) & (log_ratio > band.ceiling)
            clamped, clipped = torch.where(over, band.ceiling, clamped), clipped | over
    return clamped.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), clipped


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, band: ClipBand | None) -> ClipResult:
    """PPO's pessimistic surrogate ``exp(clamp(log_ratio)) A``, with `exp` as the last operation.

    Args:
        log_ratio: ``(B, T)`` per token, or ``(B, 1)`` per response (a sum or a mean); carries the gradient.
        advantages: broadcasts against ``log_ratio``.
        band: see `clamp_by_advantage`.

    Returns:
        Objective, judged log-ratio and clip decisions, each of ``log_ratio``'s shape. (Schulman et al., arXiv 1707.06347)
    """
    advantages = advantages.detach().float()
    clamped, clipped = clamp_by_advantage(log_ratio, advantages, band)
    return ClipResult(clamped.exp() * advantages, log_ratio.detach(), clipped, band)


def ratio_band(clip_low: float, clip_high: float, dual_clip: float | None, like: Tensor) -> ClipBand:
    """The band of a rule stated on the ratio: ``1 - clip_low <= ratio <= 1 + clip_high``, in log space.

    Args:
        clip_low: 0 <= clip_low < 1.
        clip_high: not negative.
        dual_clip: largest ratio where the advantage is negative, or None for no ceiling there.
        like: a tensor of the wanted device; edges are float32 scalars.
    """
    # the logarithm in float64 first: 1 + 3e-4 in float32 has lost half of its digits
    values = [math.log1p(-clip_low), math.log1p(clip_high), math.log(dual_clip or 1.0)]
    edges = torch.tensor(values, dtype=torch.float32, device=like.device)
    return ClipBand(low=edges[0], high=edges[1], ceiling=None if dual_clip is None else edges[2])
