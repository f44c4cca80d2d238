"""From rewards and group ids to advantages, one column per response."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import torch

from rlzoo.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

Advantage = Literal["group_norm", "group_mean", "leave_one_out", "batch_norm", "raw"]
"""How rewards become advantages. ``group_norm`` (arXiv 2402.03300): ``(R - mean) / (std + 1e-6)`` in the group, std with n - 1;
``group_mean`` (2503.20783): ``R - mean``; ``leave_one_out`` (2402.14740): ``R - mean of the others``; ``batch_norm``
(2501.03262): normalised over the whole batch; ``raw``: the reward itself."""

STD_FLOOR = 1e-6


def compute_advantages(rewards: Tensor, group_ids: Tensor, advantage: Advantage) -> Tensor:
    """Advantages of a rollout batch.

    Args:
        rewards: ``(B,)``.
        group_ids: ``(B,)`` integers; responses to one prompt share one.
        advantage: the estimator, see `Advantage`.

    Returns:
        float32 ``(B, 1)``, without gradient. A group whose rewards are all equal gets exactly 0 from every estimator that
        compares within groups.

    Raises:
        UserError: an unknown estimator, or leave_one_out on a group of one.

    Example:
        >>> rewards, group_ids = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([0, 0, 0, 0])
        >>> compute_advantages(rewards, group_ids, "leave_one_out").flatten().tolist()  # 1 - 1/3, 0 - 2/3
        [0.6666666865348816, -0.6666666865348816, -0.6666666865348816, 0.6666666865348816]
    """
    if advantage not in get_args(Advantage):
        raise UserError(f"unknown advantage estimator {advantage!r} (known: {', '.join(get_args(Advantage))})")
    rewards = rewards.detach().double()
    if advantage == "raw":
        return rewards[:, None].float()
    if advantage == "batch_norm":
        group_ids = torch.zeros_like(group_ids)
    group = torch.unique(group_ids, return_inverse=True)[1]
    count = torch.bincount(group).double()[group]
    if advantage == "leave_one_out" and bool((count < 2).any()):
        raise UserError("leave_one_out needs at least 2 responses per prompt; raise rollout.group_size")
    mean = _group_sum(rewards, group)[group] / count
    centred = torch.where(_is_constant(rewards, group), 0.0, rewards - mean)
    if advantage == "group_mean":
        return centred[:, None].float()
    if advantage == "leave_one_out":
        return (centred * count / (count - 1))[:, None].float()
    variance = _group_sum(centred**2, group)[group] / (count - 1).clamp(min=1)
    return (centred / (variance.sqrt() + STD_FLOOR))[:, None].float()


def _group_sum(values: Tensor, group: Tensor) -> Tensor:
    return torch.zeros(int(group.max()) + 1, dtype=values.dtype, device=values.device).index_add_(0, group, values)


def _is_constant(rewards: Tensor, group: Tensor) -> Tensor:
    """True where every reward of the row's group is the same number: rounding in the mean must not make it a signal."""
    shape = (int(group.max()) + 1,)
    low = torch.full(shape, torch.inf, dtype=rewards.dtype, device=rewards.device)
    high = -low
    low = low.scatter_reduce(0, group, rewards, "amin")
    high = high.scatter_reduce(0, group, rewards, "amax")
    return (low == high)[group]
