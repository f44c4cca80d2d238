"""From rewards and group ids to advantages: one per response, or one per token where a KL is part of the reward."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, get_args

import torch

from rlzoo.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

Advantage = Literal[
    "group_norm", "group_mean", "leave_one_out", "max_rl", "pass@2", "pass@4", "pass@8", "pass@16", "pass@32",
    "batch_norm", "raw",
]  # fmt: skip
"""How rewards become advantages. ``group_norm`` (arXiv 2402.03300): ``(R - mean) / (std + 1e-6)`` in the group, std with n - 1;
``group_mean`` (2503.20783): ``R - mean``; ``leave_one_out`` (2402.14740): ``R - mean of the others``; ``max_rl`` (2602.02710):
``(R - mean) / mean``, 0 where the mean is not positive; ``pass@k`` (2508.10751): what a response adds to the best of k, see
`pass_at_k`; ``batch_norm`` (2501.03262): normalised over the whole batch; ``raw``: the reward itself."""

TOKEN_ADVANTAGES: tuple[Advantage, ...] = ("batch_norm", "raw")
"""The estimators that have a value per token, see `compute_token_advantages`."""

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
        UserError: an unknown estimator, or groups smaller than `min_group_size`.

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
    smallest, needed = int(count.min()), min_group_size(advantage)
    if smallest < needed and advantage not in ("group_norm", "group_mean", "max_rl"):  # which give a group of one 0
        raise UserError(f"{advantage} needs at least {needed} responses per prompt, not {smallest}; raise rollout.group_size")
    if advantage.startswith("pass@"):
        return pass_at_k(rewards, group, k=needed)[:, None].float()
    mean = _group_sum(rewards, group)[group] / count
    centred = torch.where(_is_constant(rewards, group), 0.0, rewards - mean)
    if advantage == "group_mean":
        return centred[:, None].float()
    if advantage == "leave_one_out":
        return (centred * count / (count - 1))[:, None].float()
    if advantage == "max_rl":
        return torch.where(mean > 0, centred / mean, 0.0)[:, None].float()
    variance = _group_sum(centred**2, group)[group] / (count - 1).clamp(min=1)
    return (centred / (variance.sqrt() + STD_FLOOR))[:, None].float()


def min_group_size(advantage: Advantage) -> int:
    """Responses per prompt that an estimator needs to say anything: 2 if it compares them, k for ``pass@k``."""
    if advantage.startswith("pass@"):
        return int(advantage.removeprefix("pass@"))
    return 1 if advantage in TOKEN_ADVANTAGES else 2


def pass_at_k(rewards: Tensor, group: Tensor, k: int) -> Tensor:
    """What each response adds to the best of k drawn from its group (arXiv 2508.10751, for any rewards).

    With M the largest reward of a k-subset of the group, E its mean and sd its standard deviation over all such subsets:
    ``(mean of M over the subsets that hold the response - E) / sd``, and 0 where every subset has the same M.

    Args:
        rewards: ``(B,)`` float64.
        group: ``(B,)`` integers from 0.
        k: size of the subsets, at most that of the smallest group.

    Returns:
        ``(B,)`` float64.
    """
    advantages = torch.zeros_like(rewards)
    for index in range(int(group.max()) + 1):
        rows = (group == index).nonzero()[:, 0]
        values = rewards[rows]
        best = _share_of_maxima(len(values), k).to(values)  # of the ascending rewards
        ascending = values.sort().values
        mean = (best * ascending).sum()
        spread = (best * (ascending - mean).square()).sum().sqrt()
        if bool((ascending[best > 0] == ascending[-1]).all()):
            continue
        others = torch.stack([torch.cat([values[:i], values[i + 1 :]]) for i in range(len(values))]).sort(dim=-1).values
        with_it = (torch.maximum(others, values[:, None]) * _share_of_maxima(len(values) - 1, k - 1).to(values)).sum(dim=-1)
        advantages[rows] = (with_it - mean) / spread
    return advantages


def _share_of_maxima(n: int, k: int) -> Tensor:
    """For the j-th smallest of n numbers the share of k-subsets whose largest it is, ``C(j - 1, k - 1) / C(n, k)``."""
    return torch.tensor([math.comb(j, k - 1) / math.comb(n, k) for j in range(n)], dtype=torch.float64)


def compute_token_advantages(
    rewards: Tensor, token_kl: Tensor, response_mask: Tensor, kl_coef: float, advantage: Advantage
) -> Tensor:
    """Advantages with the KL inside the reward (arXiv 2501.03262): a token answers for the KL from itself onwards.

    The return of token t is ``R - kl_coef * sum of token_kl from t to the end``. ``raw`` is the return itself;
    ``batch_norm`` takes ``(return - mean) / (std + 1e-6)``, mean and std (n - 1) over all response tokens of the batch.

    Args:
        rewards: ``(B,)``.
        token_kl: ``(B, T)`` in nats, ``log pi_old - log pi_ref`` of each token drawn.
        response_mask: ``(B, T)`` bool.
        kl_coef: weight of the KL.
        advantage: one of `TOKEN_ADVANTAGES`.

    Returns:
        float32 ``(B, T)``, without gradient, 0 on the padding; exactly 0 everywhere if all returns are equal.

    Raises:
        UserError: another estimator.

    Example:
        >>> one, mask = torch.ones(1), torch.tensor([[True, True, False]])
        >>> compute_token_advantages(one, torch.tensor([[0.5, 2.0, 9.0]]), mask, 0.1, "raw").tolist()  # 1 - .25, 1 - .2
        [[0.75, 0.800000011920929, 0.0]]
    """
    if advantage not in TOKEN_ADVANTAGES:
        raise UserError(f"advantage {advantage!r} has no values per token (allowed: {', '.join(TOKEN_ADVANTAGES)})")
    zero = torch.zeros((), dtype=torch.float64, device=rewards.device)
    kl_to_go = torch.where(response_mask, token_kl.detach().double(), zero).flip(-1).cumsum(-1).flip(-1)
    returns = rewards.detach().double()[:, None] - kl_coef * kl_to_go
    values = returns[response_mask]
    if advantage == "batch_norm":
        spread = values.std() if values.numel() > 1 else zero
        returns = (returns - values.mean()) / (spread + STD_FLOOR)
        if bool((values == values[:1]).all()):  # rounding in the mean must not make equal returns a signal
            returns = torch.zeros_like(returns)
    return torch.where(response_mask, returns, zero).float()


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
