"""Asks whether a model is a pure function of its row: the log-probs of a row must not depend on how the row is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REACH = 64
"""Length in tokens of the longest row of a probe, if neither the run nor the model's configuration asks for another."""


@dataclass(frozen=True)
class Probe:
    """Rows of uneven length, and their log-probs in plain passes of the model, one row at a time."""

    rows: tuple[tuple[int, ...], ...]  # token ids
    log_probs: tuple[Tensor, ...]  # (S - 1,) each, float32 on the CPU: of every token but the first

    @classmethod
    def of(cls, model: PreTrainedModel, longest: int | None = None) -> Probe:
        """Score rows of up to ``longest`` tokens in plain passes: evaluation mode, one row, no padding, no cache."""
        length, size = longest or REACH, model.config.get_text_config().vocab_size
        lengths = sorted({length, max(2, length * 2 // 3), max(2, length // 3)})
        rng = torch.Generator().manual_seed(0)
        rows = tuple(tuple(torch.randint(size, (number,), generator=rng).tolist()) for number in lengths)
        return cls(rows, tuple(plain_log_probs(model, row) for row in rows))


@torch.no_grad()
def plain_log_probs(model: PreTrainedModel, row: Sequence[int]) -> Tensor:
    """Return the log-probs ``(S - 1,)`` of all tokens of a row but the first, from one plain pass."""
    ids, was_training = torch.tensor([row], device=model.device), model.training
    model.eval()
    try:
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    finally:
        model.train(was_training)
    log_probs: Tensor = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].cpu()
    return log_probs
