"""Advantage estimators: frozen callables that turn the rewards of a rollout batch into advantages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlzoo.core import ops
from rlzoo.core.errors import UserError
from rlzoo.core.settings import Settings

Advantage = str | dict[str, Any]
"""A policy's estimator: a name, or a mapping with a name and settings, such as ``{"name": "pass_at_k", "k": 8}``."""


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """Inputs to an estimator for B responses of up to T tokens. Per-response values are ``(B, 1)`` columns.

    Example:
        Two responses to one prompt have 3 and 2 tokens, and rewards 1 and 0:

        >>> inputs = AdvantageInputs(
        ...     rewards=torch.tensor([[1.0], [0.0]]),
        ...     group_ids=torch.tensor([[0], [0]]),
        ...     response_mask=torch.tensor([[True, True, True], [True, True, False]]),
        ... )
        >>> inputs.returns().tolist()
        [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]
    """

    rewards: Tensor  # (B, 1) reward for the whole response, after shaping
    group_ids: Tensor  # (B, 1) int64; responses to the same prompt share an ID
    response_mask: Tensor  # (B, T) bool, True on tokens that the model chose
    turn_ids: Tensor | None = None  # (B, T) int64: 0, 1, ... on the model's tokens, -1 elsewhere
    token_rewards: Tensor | None = None  # (B, T) per-token rewards, in addition to `rewards`
    state_ids: Tensor | None = None  # (B, T) int64: environment state at the start of the token's turn
    old_log_probs: Tensor | None = None  # (B, T) under the model before the first update on the batch
    ref_log_probs: Tensor | None = None  # (B, T) under the reference model, `model.reference`
    reward_parts: Mapping[str, Tensor] | None = None  # (B, 1) each: the named rewards; `rewards` is their weighted sum
    reward_weights: Mapping[str, float] = field(default_factory=dict)  # weights of the named rewards; 1 for names not listed
    values: Tensor | None = None  # (B, T) from the critic before each token, before the first update on the batch
    last_values: Tensor | None = None  # (B, 1) from the critic after the last token
    finished: Tensor | None = None  # (B, 1) bool; False if the response was cut off at a limit

    def select(self, rows: Tensor) -> AdvantageInputs:
        """Return the inputs for the given rows, ``(R,)`` int64."""
        return self.mapped(lambda values: values[rows])

    def mapped(self, change: Callable[[Tensor], Tensor]) -> AdvantageInputs:
        """Return the inputs with ``change`` applied to each tensor."""
        present = {column.name: getattr(self, column.name) for column in fields(self)}
        tensors: dict[str, Any] = {name: change(value) for name, value in present.items() if isinstance(value, Tensor)}
        parts = self.reward_parts and {name: change(value) for name, value in self.reward_parts.items()}
        return replace(self, **tensors, reward_parts=parts)

    def returns(self) -> Tensor:
        """Compute each token's return, ``(B, T)``: the response's reward plus the token rewards from that token on."""
        later = torch.zeros_like(self.response_mask, dtype=self.rewards.dtype)
        if self.token_rewards is not None:
            later = torch.where(self.response_mask, self.token_rewards, 0.0).flip(-1).cumsum(-1).flip(-1)
        return torch.where(self.response_mask, self.rewards + later, 0.0)


class AdvantageEstimator(Settings, ABC):
    """Turns the rewards of a rollout batch into advantages.

    A subclass sets `name` and `paper`, declares its settings as fields with descriptions and bounds, and implements
    `estimate`. Instances are frozen and compare by value.

    Example:
        >>> class Doubled(AdvantageEstimator):
        ...     "Twice the reward."
        ...     name, paper, compares = "doubled", "none", False
        ...     def estimate(self, inputs):
        ...         return 2 * inputs.rewards
        >>> mask = torch.ones(2, 3, dtype=torch.bool)
        >>> Doubled()(AdvantageInputs(torch.tensor([[1.0], [0.5]]), torch.tensor([[0], [0]]), mask)).tolist()
        [[2.0], [1.0]]
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    aliases: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # other names, and the settings that each implies
    needs: ClassVar[frozenset[str]] = frozenset()  # optional inputs that the estimator requires, from `NEEDS`
    per_token: ClassVar[bool] = False  # whether the estimator always returns per-token values
    takes_token_rewards: ClassVar[bool] = False  # whether the estimator turns token rewards into per-token advantages
    compares: ClassVar[bool] = True  # whether the estimator compares the responses to one prompt
    takes_one: ClassVar[bool] = False  # whether a single response to a prompt gets advantage 0 instead of causing an error
    exempt: ClassVar[Mapping[str, str]] = {}  # laws of `rlzoo.testing` that the estimator breaks on purpose, and why

    @property
    def min_group_size(self) -> int:
        """Minimum number of responses per prompt."""
        return 2 if self.compares else 1

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        """Estimate the advantages.

        Returns:
            Detached float32 advantages, ``(B, 1)``, or ``(B, T)`` if credit differs by token, with 0 outside the mask.

        Raises:
            UserError: a group is smaller than `min_group_size`, a required input is missing, or an input is not supported.
        """
        advantages = self.estimate(self._checked(inputs)).detach()
        if advantages.shape[-1] != 1:
            advantages = torch.where(inputs.response_mask, advantages, 0.0)
        return advantages.float()

    def value_targets(self, inputs: AdvantageInputs) -> Tensor:
        """Compute the values that the critic should have returned.

        Returns:
            Detached float32 value targets, ``(B, T)``, with 0 outside the mask.

        Raises:
            UserError: see `__call__`.
        """
        targets = self.targets(self._checked(inputs)).detach()
        return torch.where(inputs.response_mask, targets, 0.0).float()

    def _checked(self, inputs: AdvantageInputs) -> AdvantageInputs:
        """Return the inputs in float64, or raise `UserError` as `__call__` describes."""
        smallest = int(ops.group_sum(torch.ones_like(inputs.rewards), inputs.group_ids).min())
        if smallest < self.min_group_size and not self.takes_one:
            raise UserError(
                f"advantage {self.name!r} needs at least {self.min_group_size} responses per prompt, not {smallest}; "
                "sample more responses per prompt (rollout.group_size)"
            )
        if missing := sorted(need for need in self.needs if getattr(inputs, need) is None):
            raise UserError(f"advantage {self.name!r} needs {missing[0]}, which this run does not have")
        if inputs.token_rewards is not None and not self.takes_token_rewards:
            raise UserError(f"advantage {self.name!r} does not accept per-token rewards, but this run has them")
        return inputs.mapped(lambda values: values.detach().double() if values.is_floating_point() else values)

    @abstractmethod
    def estimate(self, inputs: AdvantageInputs) -> Tensor:
        """Return float64 advantages of shape ``(B, 1)`` or ``(B, T)``. Floating-point inputs are float64 and detached."""

    def targets(self, inputs: AdvantageInputs) -> Tensor:
        """Return float64 value targets ``(B, T)``. An estimator that needs ``values`` implements this method."""
        raise NotImplementedError


NEEDS = tuple(column.name for column in fields(AdvantageInputs) if column.default is None)
"""The optional inputs to an estimator."""
