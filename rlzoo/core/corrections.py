"""Frozen callables that weight the objective to correct for samplers whose probabilities differ from the trainer's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlzoo.core.settings import Settings


@dataclass(frozen=True, slots=True)
class CorrectionInputs:
    """Inputs to a correction for B responses of up to T tokens, before the first optimizer step on them. Log-probs are in nats.

    Example:
        >>> mask = torch.tensor([[True, True]])
        >>> old, sampled = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.1, -1.2]])
        >>> CorrectionInputs(old, sampled, mask, torch.ones(1, 1)).log_ratio
        tensor([[0.1000, 0.2000]])
    """

    old_log_probs: Tensor  # (B, T) under the trainer's model
    rollout_log_probs: Tensor  # (B, T) as reported by the sampler
    response_mask: Tensor  # (B, T) bool, True on tokens that the model chose
    advantages: Tensor  # (B, 1), or (B, T) if credit differs by token

    @property
    def log_ratio(self) -> Tensor:
        """Per-token log-ratio of trainer to sampler (``log pi_old - log pi_rollout``) as float32 ``(B, T)``; 0 where masked."""
        difference = self.old_log_probs.float() - self.rollout_log_probs.float()
        return torch.where(self.response_mask, difference, 0.0)


class Correction(Settings, ABC):
    """Weights the objective of each response or token according to the log-probs of the trainer and the sampler.

    A subclass sets `name` and `paper`, declares its settings as fields with descriptions and bounds, and implements
    `weigh`. Instances are frozen and compare by value.

    Example:
        >>> class Near(Correction):
        ...     "Drops tokens whose ratio is above 2."
        ...     name, paper, per_token = "near", "none", True
        ...     def weigh(self, inputs):
        ...         return (inputs.log_ratio.exp() <= 2).float()
        >>> mask, sampled = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[-1.0, -2.0]])
        >>> Near()(CorrectionInputs(torch.full((1, 2), -1.0), sampled, mask, torch.ones(1, 1)))
        tensor([[1., 0.]])
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    aliases: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # other names, and the settings that each implies
    per_token: ClassVar[bool] = False  # whether the correction returns per-token weights
    exempt: ClassVar[Mapping[str, str]] = {}  # laws of `rlzoo.testing` that the correction breaks on purpose, and why

    @property
    def is_per_token(self) -> bool:
        """Whether these settings yield per-token weights, which a per-response objective cannot use."""
        return self.per_token

    def __call__(self, inputs: CorrectionInputs) -> Tensor:
        """Compute non-negative, detached float32 weights of shape ``(B, 1)``, or ``(B, T)`` if they are per token."""
        return self.weigh(inputs).detach().float()

    @abstractmethod
    def weigh(self, inputs: CorrectionInputs) -> Tensor:
        """Compute the weights, of shape ``(B, 1)`` or ``(B, T)``; see `__call__`."""
