"""Advantage estimators: from rewards and group ids to advantages, each a small frozen callable."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from rlzoo.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

Advantage = Literal[
    "group_norm", "group_mean", "leave_one_out", "max_rl", "pass@2", "pass@4", "pass@8", "pass@16", "pass@32",
    "batch_norm", "raw",
]  # fmt: skip
"""Names of the estimators in `ESTIMATORS`."""

STD_FLOOR = 1e-6


class Estimator(BaseModel, ABC):
    """Turns the rewards of a rollout batch into advantages.

    A subclass implements `estimate` in float64, and has a name in `Advantage` and `ESTIMATORS`. Instances are frozen and
    compare by value.

    Example:
        >>> import torch
        >>> rewards, group_ids = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([0, 0, 0, 0])
        >>> LeaveOneOut()(rewards, group_ids).flatten().tolist()  # 1 - 1/3, 0 - 2/3
        [0.6666666865348816, -0.6666666865348816, -0.6666666865348816, 0.6666666865348816]
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    paper: ClassVar[str]
    compares: ClassVar[bool] = True  # whether it compares the responses to one prompt
    takes_one: ClassVar[bool] = False  # whether a group of one response gets 0 instead of being refused

    @property
    def min_group_size(self) -> int:
        """Responses per prompt that the estimator needs."""
        return 2 if self.compares else 1

    def __call__(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        """Estimate the advantages.

        Args:
            rewards: ``(B,)``.
            group_ids: ``(B,)`` integers; responses to one prompt share one.

        Returns:
            float32 ``(B, 1)``, without gradient. A group whose rewards are all equal gets exactly 0 from every estimator that
            compares.

        Raises:
            UserError: a group is smaller than `min_group_size`.
        """
        group = torch.unique(group_ids, return_inverse=True)[1]
        smallest = int(torch.bincount(group).min())
        if smallest < self.min_group_size and not self.takes_one:
            raise UserError(
                f"{self.name} needs at least {self.min_group_size} responses per prompt, not {smallest}; "
                "raise rollout.group_size"
            )
        return self.estimate(rewards.detach().double(), group)[:, None].float()

    @property
    def name(self) -> str:
        """The estimator's name in `ESTIMATORS`, or of its class."""
        return next((name for name, estimator in ESTIMATORS.items() if estimator == self), type(self).__name__)

    @abstractmethod
    def estimate(self, rewards: Tensor, group: Tensor) -> Tensor:
        """Estimate the advantages in float64, ``(B,)``, given groups numbered from 0."""

    def estimate_tokens(self, returns: Tensor, response_mask: Tensor) -> Tensor:
        """Estimate an advantage for each token from its return, ``(B, T)`` float64.

        Raises:
            UserError: the estimator has no values per token.
        """
        allowed = ", ".join(TOKEN_ADVANTAGES)
        raise UserError(f"advantage {self.name!r} has no values per token (allowed: {allowed})")


class GroupNorm(Estimator):
    """``(R - mean) / (std + 1e-6)`` within the group, std with n - 1."""

    paper, takes_one = "arXiv 2402.03300", True

    def estimate(self, rewards: Tensor, group: Tensor) -> Tensor:
        """See `Estimator.estimate`."""
        return _centred(rewards, group) / (_std(rewards, group) + STD_FLOOR)


class GroupMean(Estimator):
    """``R - mean`` of the group."""

    paper, takes_one = "arXiv 2503.20783", True

    def estimate(self, rewards: Tensor, group: Tensor) -> Tensor:
        """See `Estimator.estimate`."""
        return _centred(rewards, group)


class LeaveOneOut(Estimator):
    """``R - mean of the others`` in the group."""

    paper = "arXiv 2402.14740"

    def estimate(self, rewards: Tensor, group: Tensor) -> Tensor:
        """See `Estimator.estimate`."""
        count = _count(group)
        return _centred(rewards, group) * count / (count - 1)


class MaxRL(Estimator):
    """``(R - mean) / mean`` in the group, 0 where the mean is not positive: the gradient of log(success rate)."""

    paper, takes_one = "arXiv 2602.02710", True

    def estimate(self, rewards: Tensor, group: Tensor) -> Tensor:
        """See `Estimator.estimate`."""
        mean = _mean(rewards, group)
        return torch.where(mean > 0, _centred(rewards, group) / mean, 0.0)


class PassAtK(Estimator):
    """What a response adds to the best of k drawn from its group, for any rewards.

    With M the largest reward of a k-subset of the group, E its mean and sd its standard deviation over all such subsets:
    ``(mean of M over the subsets that hold the response - E) / sd``, and 0 where every subset has the same M.
    """

    paper = "arXiv 2508.10751"

    k: int = Field(2, ge=2, le=4096, description="size of the subsets")

    @property
    def min_group_size(self) -> int:
        """See `Estimator.min_group_size`."""
        return self.k

    def estimate(self, rewards: Tensor, group: Tensor) -> Tensor:
        """See `Estimator.estimate`."""
        advantages = torch.zeros_like(rewards)
        for index in range(int(group.max()) + 1):
            rows = (group == index).nonzero()[:, 0]
            values = rewards[rows]
            best = _share_of_maxima(len(values), self.k).to(values)  # of the ascending rewards
            ascending = values.sort().values
            mean = (best * ascending).sum()
            spread = (best * (ascending - mean).square()).sum().sqrt()
            if bool((ascending[best > 0] == ascending[-1]).all()):
                continue
            others = torch.stack([torch.cat([values[:i], values[i + 1 :]]) for i in range(len(values))]).sort(dim=-1).values
            share = _share_of_maxima(len(values) - 1, self.k - 1).to(values)
            with_it = (torch.maximum(others, values[:, None]) * share).sum(dim=-1)
            advantages[rows] = (with_it - mean) / spread
        return advantages


class BatchNorm(Estimator):
    """``(R - mean) / (std + 1e-6)`` over the whole batch, std with n - 1; per token over all tokens of the batch."""

    paper, compares = "arXiv 2501.03262", False

    def estimate(self, rewards: Tensor, group: Tensor) -> Tensor:
        """See `Estimator.estimate`."""
        return GroupNorm().estimate(rewards, torch.zeros_like(group))

    def estimate_tokens(self, returns: Tensor, response_mask: Tensor) -> Tensor:
        """See `Estimator.estimate_tokens`."""
        values = returns[response_mask]
        if bool((values == values[:1]).all()):  # rounding in the mean must not turn equal returns into a signal
            return torch.zeros_like(returns)
        return (returns - values.mean()) / (values.std() + STD_FLOOR)


class Raw(Estimator):
    """The reward itself; per token the return."""

    paper, compares = "none", False

    def estimate(self, rewards: Tensor, group: Tensor) -> Tensor:
        """See `Estimator.estimate`."""
        return rewards

    def estimate_tokens(self, returns: Tensor, response_mask: Tensor) -> Tensor:
        """See `Estimator.estimate_tokens`."""
        return returns


ESTIMATORS: Mapping[str, Estimator] = {
    "group_norm": GroupNorm(),
    "group_mean": GroupMean(),
    "leave_one_out": LeaveOneOut(),
    "max_rl": MaxRL(),
    **{f"pass@{k}": PassAtK(k=k) for k in (2, 4, 8, 16, 32)},
    "batch_norm": BatchNorm(),
    "raw": Raw(),
}
"""The estimators that ``clip.advantage`` names."""

TOKEN_ADVANTAGES: tuple[Advantage, ...] = ("batch_norm", "raw")
"""The estimators that have a value per token."""


def estimator(name: str) -> Estimator:
    """The estimator of this name.

    Raises:
        UserError: there is none.
    """
    if name not in ESTIMATORS:
        raise UserError(f"unknown advantage estimator {name!r} (known: {', '.join(ESTIMATORS)})")
    return ESTIMATORS[name]


def token_advantages(rewards: Tensor, token_kl: Tensor, response_mask: Tensor, kl_coef: float, estimator: Estimator) -> Tensor:
    """Estimate an advantage for each token, from returns with the KL inside the reward (arXiv 2501.03262).

    The return of token t is ``R - kl_coef * sum of token_kl from t to the end``: a token answers for the KL from itself on.

    Args:
        rewards: ``(B,)``.
        token_kl: ``(B, T)`` in nats, ``log pi_old - log pi_ref`` of each token drawn.
        response_mask: ``(B, T)`` bool.
        kl_coef: weight of the KL.
        estimator: one with values per token.

    Returns:
        float32 ``(B, T)``, without gradient, 0 outside the mask; exactly 0 everywhere if all returns are equal.

    Raises:
        UserError: the estimator has no values per token.

    Example:
        >>> one, mask = torch.ones(1), torch.tensor([[True, True, False]])
        >>> token_advantages(one, torch.tensor([[0.5, 2.0, 9.0]]), mask, 0.1, Raw()).tolist()  # 1 - .25, 1 - .2
        [[0.75, 0.800000011920929, 0.0]]
    """
    kl_to_go = torch.where(response_mask, token_kl.detach().double(), 0.0).flip(-1).cumsum(-1).flip(-1)
    returns = rewards.detach().double()[:, None] - kl_coef * kl_to_go
    return torch.where(response_mask, estimator.estimate_tokens(returns, response_mask), 0.0).float()


def _count(group: Tensor) -> Tensor:
    """Size of each row's group."""
    return torch.bincount(group).double()[group]


def _mean(values: Tensor, group: Tensor) -> Tensor:
    """Mean of each row's group."""
    return _sum(values, group) / _count(group)


def _sum(values: Tensor, group: Tensor) -> Tensor:
    """Sum of each row's group."""
    return torch.zeros(int(group.max()) + 1, dtype=values.dtype, device=values.device).index_add_(0, group, values)[group]


def _std(values: Tensor, group: Tensor) -> Tensor:
    """Standard deviation of each row's group, with n - 1."""
    return (_sum(_centred(values, group).square(), group) / (_count(group) - 1).clamp(min=1)).sqrt()


def _centred(values: Tensor, group: Tensor) -> Tensor:
    """Values less the mean of their group; exactly 0 where the group's values are equal, whatever their mean rounds to."""
    extremes = torch.full((2, int(group.max()) + 1), torch.inf, dtype=values.dtype, device=values.device)
    low = extremes[0].scatter_reduce(0, group, values, "amin")[group]
    high = (-extremes[1]).scatter_reduce(0, group, values, "amax")[group]
    return torch.where(low == high, 0.0, values - _mean(values, group))


def _share_of_maxima(n: int, k: int) -> Tensor:
    """For the j-th smallest of n numbers, the share of k-subsets whose largest it is, ``C(j - 1, k - 1) / C(n, k)``."""
    return torch.tensor([math.comb(j, k - 1) / math.comb(n, k) for j in range(n)], dtype=torch.float64)
