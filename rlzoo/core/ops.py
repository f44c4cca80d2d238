"""Pure tensor functions on token log-ratios, from which clip policies are built.

B is the number of responses and T the number of response tokens. Per-response values are ``(B, 1)`` columns. Log-ratios are
natural logarithms.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from rlzoo.core.types import ClipBand, ClipInputs, ClipResult

LOG_RATIO_LIMIT = 20.0
"""Maximum absolute log-ratio. Larger values are clamped before ``exp``. exp(20), about 4.9e8, is far beyond any rule's band."""


def log_probs(inputs: ClipInputs) -> Tensor:
    """Return the current model's differentiable log-probabilities as float32 ``(B, T)``, exactly 0 where masked."""
    return masked(inputs.log_probs, inputs.response_mask)


def log_ratio(inputs: ClipInputs, against: Literal["old", "rollout", "ref"] = "old") -> Tensor:
    """Compute the per-token log-ratio, float32 ``(B, T)``: ``log pi - log pi_old`` on response tokens, exactly 0 elsewhere.

    Masked positions are replaced before the subtraction so that NaN or infinity there affects neither the value nor the
    gradient.

    Args:
        inputs: inputs to the policy.
        against: the denominator. ``"rollout"`` uses the sampler's log-probabilities, or the old ones if the sampler
            reported none. ``"ref"`` uses those of the reference model, for which `needs` must name ``ref_log_probs``.

    Raises:
        ValueError: ``against`` has another value, or the inputs have no log-probabilities of a reference model.
    """
    match against:
        case "old":
            denominator: Tensor | None = inputs.old_log_probs
        case "rollout":
            denominator = inputs.old_log_probs if inputs.rollout_log_probs is None else inputs.rollout_log_probs
        case "ref":
            denominator = inputs.ref_log_probs
        case _:
            raise ValueError(f"against={against!r} is not 'old', 'rollout' or 'ref'")
    if denominator is None:
        raise ValueError("against='ref': the inputs have no ref_log_probs")
    return log_probs(inputs) - masked(denominator.detach(), inputs.response_mask)


def masked(values: Tensor, response_mask: Tensor) -> Tensor:
    """Return ``(B, T)`` values as float32, with masked positions set to exactly 0 regardless of their content."""
    return torch.where(response_mask, values.float(), torch.zeros((), device=values.device))


def limited_exp(log_ratio: Tensor) -> Tensor:
    """Compute the finite ``exp`` of a log-ratio clamped to +-`LOG_RATIO_LIMIT`, with zero gradient beyond the limit."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def lengths(response_mask: Tensor) -> Tensor:
    """Count the response tokens per row, as float32 ``(B, 1)``. A row without tokens counts as 1 so that division is safe."""
    return response_mask.sum(dim=-1, keepdim=True).clamp(min=1).float()


def sequence_sum(values: Tensor, response_mask: Tensor) -> Tensor:
    """Sum over the tokens of each response, ``(B, T) -> (B, 1)``."""
    return torch.where(response_mask, values, torch.zeros_like(values)).sum(dim=-1, keepdim=True)


def sequence_mean(values: Tensor, response_mask: Tensor) -> Tensor:
    """Average over the tokens of each response, ``(B, T) -> (B, 1)``; 0 for a row without tokens."""
    return sequence_sum(values, response_mask) / lengths(response_mask)


def per_response(values: Tensor, response_mask: Tensor) -> Tensor:
    """Average per-token values over each response, ``(B, T) -> (B, 1)``. Return per-response values unchanged."""
    return values if values.shape[-1] == 1 else sequence_mean(values, response_mask)


def positions(response_mask: Tensor) -> Tensor:
    """Return the position of each response token, counted from 1, as float32 ``(B, T)``; 0 where the mask is False."""
    return torch.where(response_mask, response_mask.cumsum(dim=-1), 0).float()


def prefix_sum(values: Tensor, response_mask: Tensor) -> Tensor:
    """Compute the cumulative sum over each response's tokens, ``(B, T)``. Masked tokens are ignored and get 0."""
    inside = torch.where(response_mask, values, torch.zeros_like(values))
    return torch.where(response_mask, inside.cumsum(dim=-1), torch.zeros_like(values))


def turn_sum(values: Tensor, turn_ids: Tensor) -> Tensor:
    """Sum over the tokens of each turn, ``(B, T)``; 0 on tokens outside any turn (``turn_ids`` is -1)."""
    inside, turn = turn_ids >= 0, turn_ids.clamp(min=0)
    zeros = torch.zeros_like(values)
    total = zeros.scatter_add(-1, turn, torch.where(inside, values, zeros))
    return torch.where(inside, total.gather(-1, turn), zeros)


def turn_mean(values: Tensor, turn_ids: Tensor) -> Tensor:
    """Average over the tokens of each turn, ``(B, T)``; 0 on tokens outside any turn (``turn_ids`` is -1)."""
    return turn_sum(values, turn_ids) / turn_sum(torch.ones_like(values), turn_ids).clamp(min=1)


def group_sum(values: Tensor, group_ids: Tensor) -> Tensor:
    """Sum over the rows of each group, ``(B, 1) -> (B, 1)``; for rules that need ``group_ids``."""
    index = _numbered(group_ids)
    return torch.zeros_like(values).index_add(0, index, values)[index]


def group_mean(values: Tensor, group_ids: Tensor) -> Tensor:
    """Average over the rows of each group, ``(B, 1) -> (B, 1)``; for rules that need ``group_ids``."""
    return group_sum(values, group_ids) / group_sum(torch.ones_like(values), group_ids)


def group_centred(values: Tensor, group_ids: Tensor) -> Tensor:
    """Subtract the mean of each group from its values, ``(B, 1)``; exactly 0 if all values in a group are equal."""
    index = _numbered(group_ids)[:, None]
    low = torch.full_like(values, torch.inf).scatter_reduce(0, index, values, "amin").gather(0, index)
    high = torch.full_like(values, -torch.inf).scatter_reduce(0, index, values, "amax").gather(0, index)
    return torch.where(low == high, torch.zeros_like(values), values - group_mean(values, group_ids))


def _numbered(group_ids: Tensor) -> Tensor:
    """Return the group IDs ``(B, 1)`` renumbered from 0, as ``(B,)``. No tensor shape depends on the number of groups."""
    order = group_ids[:, 0].argsort()
    ascending = group_ids[:, 0][order]
    number = torch.cat([torch.zeros_like(ascending[:1]), (ascending[1:] != ascending[:-1]).long()]).cumsum(0)
    return torch.zeros_like(number).scatter(0, order, number)


def step_mean(values: Tensor, response_mask: Tensor) -> Tensor:
    """Average over all response tokens of the step. Only rules with scope "batch" may call this function."""
    return torch.where(response_mask, values, torch.zeros_like(values)).sum() / response_mask.sum().clamp(min=1)


def clamp_by_advantage(log_ratio: Tensor, advantages: Tensor, band: ClipBand | None) -> tuple[Tensor, Tensor]:
    """Clamp a log-ratio on the side towards which the advantage pushes it.

    A ratio is positive and monotone in its logarithm. Therefore, ``min(r A, clip(r) A)`` equals ``exp(clamped) A`` in value
    and gradient, with ``clamped = min(log_ratio, high)`` where A > 0 and ``max(log_ratio, low)`` where A < 0. Unlike the
    ratio, the clamped log-ratio cannot overflow. A dual-clip ceiling (arXiv 1912.09729) also caps the log-ratio where A < 0.

    Args:
        log_ratio: ``(B, T)`` or ``(B, 1)``.
        advantages: broadcastable to ``log_ratio``.
        band: edges to clamp to, or None for a rule that does not clip.

    Returns:
        The log-ratio, clamped to the band and to +-`LOG_RATIO_LIMIT`, and a bool tensor of the same shape that is True
        where the band, rather than the limit, cut the gradient.
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
    """Compute PPO's pessimistic surrogate ``exp(clamp(log_ratio)) A`` (Schulman et al., arXiv 1707.06347).

    Args:
        log_ratio: ``(B, T)`` per token, or ``(B, 1)`` per response (a sum or a mean), with a gradient.
        advantages: broadcastable to ``log_ratio``.
        band: see `clamp_by_advantage`.

    Returns:
        The objective, the judged log-ratio and the clip decisions, each with the shape of ``log_ratio``.
    """
    advantages = advantages.detach().float()
    clamped, clipped = clamp_by_advantage(log_ratio, advantages, band)
    return ClipResult(clamped.exp() * advantages, log_ratio.detach(), clipped, band)


def ratio_band(clip_low: float, clip_high: float, dual_clip: float | None, like: Tensor) -> ClipBand:
    """Return the band ``1 - clip_low <= ratio <= 1 + clip_high`` in log space.

    Args:
        clip_low: 0 <= clip_low < 1.
        clip_high: non-negative.
        dual_clip: largest ratio where the advantage is negative; None sets no ceiling.
        like: a tensor whose device is used for the edges, which are float32 scalars.
    """
    # take the logarithm in float64: in float32, 1 + 3e-4 keeps only half of the digits of 3e-4
    values = [math.log1p(-clip_low), math.log1p(clip_high), math.log(dual_clip or 1.0)]
    edges = torch.tensor(values, dtype=torch.float32, device=like.device)
    return ClipBand(low=edges[0], high=edges[1], ceiling=None if dual_clip is None else edges[2])
