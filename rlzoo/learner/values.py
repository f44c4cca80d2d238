"""A module that computes the values of response tokens from token IDs, and the loss for these values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rlzoo.learner.micro_batches import ModelInputs


class ResponseValues(nn.Module):
    """Wraps a causal language model to compute the values of a response's tokens with a linear head in float32.

    The head starts at 0. The model's own head is not used.
    """

    def __init__(self, language_model: PreTrainedModel) -> None:
        super().__init__()
        self.language_model = language_model
        self.head = nn.Linear(language_model.config.get_text_config().hidden_size, 1)
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)

    def forward(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        """Compute the value before each token that the model chose, ``(N,)``, and return it with and without a gradient."""
        states = self.language_model.base_model(**inputs.arguments).last_hidden_state[inputs.predicts]
        with torch.autocast(states.device.type, enabled=False):
            values = self.head(states.to(self.head.weight.dtype))[:, 0]
        return values, values.detach()


def value_loss(values: Tensor, old_values: Tensor, targets: Tensor, mask: Tensor, clip: float | None) -> Tensor:
    """Sum the clipped squared error over the tokens (arXiv 1707.06347 and its code): half of max((V - R)^2, (V' - R)^2).

    V' is V, clamped to within ``clip`` of the value before the first update. A value that has moved further than ``clip``
    towards its target has no gradient.

    Args:
        values: ``(B, T)`` from the critic.
        old_values: ``(B, T)`` from the critic before the first update on the batch.
        targets: ``(B, T)``.
        mask: ``(B, T)`` bool, True on tokens that the model chose.
        clip: None for the plain squared error.
    """
    error = (values - targets).square()
    if clip is not None:
        near = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
        error = torch.maximum(error, (near - targets).square())
    return torch.where(mask, error, 0.0).sum() / 2
