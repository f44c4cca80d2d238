"""Corrections for a sampler whose probabilities differ from the trainer's: frozen callables that weigh the objective."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from rlzoo import ops

if TYPE_CHECKING:
    from torch import Tensor

Pool = Literal["token", "sum", "mean"]
"""Whose ratio is judged: each token's, or the response's as the sum or mean of its log-ratios."""


class Correction(BaseModel, ABC):
    """Weighs the objective, given the log-ratio of trainer and sampler before the first update.

    With rho the ratio ``exp(log pi_old - log pi_rollout)``, pooled as the correction says. Instances are frozen and compare
    by value.

    Example:
        >>> import torch
        >>> two_tokens = torch.tensor([[0.1, 0.2]])
        >>> Truncate(pool="sum", high=1.2)(two_tokens, torch.ones(1, 2, dtype=torch.bool))  # min(exp(0.3), 1.2)
        tensor([[1.2000]])
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    paper: ClassVar[str]

    @property
    def is_per_token(self) -> bool:
        """Whether there is a weight for each token, which an objective per response cannot take."""
        return getattr(self, "pool", None) == "token"

    @abstractmethod
    def __call__(self, log_ratio: Tensor, response_mask: Tensor) -> Tensor:
        """Compute the weights, float32 ``(B, 1)``, or ``(B, T)`` for one per token.

        Args:
            log_ratio: ``(B, T)`` log pi_old - log pi_rollout per token.
            response_mask: ``(B, T)`` bool.
        """


class Pooled(Correction):
    """A correction by the ratio of tokens or of responses."""

    pool: Pool = Field("token", description="whose ratio is judged: each token's, or the response's as sum or mean")
    high: float = Field(2.0, gt=0, description="largest ratio that is kept")

    def ratio(self, log_ratio: Tensor, response_mask: Tensor) -> Tensor:
        """The pooled ratio, limited to what can be exponentiated."""
        if self.pool == "token":
            return ops.limited_exp(torch.where(response_mask, log_ratio, 0.0))
        total = ops.sequence_sum(log_ratio, response_mask)
        return ops.limited_exp(total if self.pool == "sum" else total / ops.lengths(response_mask))


class Truncate(Pooled):
    """``min(rho, high)``: truncated importance sampling."""

    paper = "none"

    def __call__(self, log_ratio: Tensor, response_mask: Tensor) -> Tensor:
        """See `Correction`."""
        return self.ratio(log_ratio, response_mask).clamp(max=self.high)


class Mask(Pooled):
    """``rho`` where ``rho <= high``, else 0: masked importance sampling."""

    paper = "none"

    def __call__(self, log_ratio: Tensor, response_mask: Tensor) -> Tensor:
        """See `Correction`."""
        ratio = self.ratio(log_ratio, response_mask)
        return torch.where(ratio <= self.high, ratio, 0.0)


class IcePop(Pooled):
    """``rho`` where ``low <= rho <= high``, else 0."""

    paper = "arXiv 2510.18855"

    low: float = Field(0.5, ge=0, description="smallest ratio that is kept")

    def __call__(self, log_ratio: Tensor, response_mask: Tensor) -> Tensor:
        """See `Correction`."""
        ratio = self.ratio(log_ratio, response_mask)
        return torch.where((ratio >= self.low) & (ratio <= self.high), ratio, 0.0)


class LengthFair(Correction):
    """1 where the summed log-ratio of the response is within ``width * sqrt(L)``, else 0.

    This one is ours. A sum spreads with the square root of the length: bounds that do not grow with it drop long responses
    before short ones, and bounds that do drop every length alike.
    """

    paper = "none"

    width: float = Field(0.03, gt=0, description="half-width of the band per square root of a token, in nats")

    def __call__(self, log_ratio: Tensor, response_mask: Tensor) -> Tensor:
        """See `Correction`."""
        total = ops.sequence_sum(log_ratio, response_mask)
        return (total.abs() <= self.width * ops.lengths(response_mask).sqrt()).float()


CORRECTIONS: Mapping[str, type[Correction]] = {"tis": Truncate, "mis": Mask, "icepop": IcePop, "length_fair": LengthFair}
"""The corrections that ``mismatch.correction`` names."""
