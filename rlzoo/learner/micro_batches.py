"""Splits rows into micro-batches, distributes them among processes, and builds the model's inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from rlzoo.models.pretrained import context_length
from rlzoo.models.probe import rotary_switch
from rlzoo.models.processes import deal
from rlzoo.rollout.draws import refuse_nan

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

    from rlzoo.config.sections import LearnerConfig
    from rlzoo.learner.batch import Batch
    from rlzoo.rollout.kept import KeptSets

PaddingSide = Literal["left", "right"]


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """Inputs to one forward pass: R rows padded to S tokens, or several rows packed into one row of S tokens.

    For a prompt (5, 6) with the response (7, 1), right-padded to 5 tokens, the row of ``input_ids`` is 5, 6, 7, 1, 0. The row
    of ``predicts`` is False, True, True, False, False, because positions 1 and 2 predict the response.
    """

    input_ids: Tensor  # (R, S)
    attention_mask: Tensor | None  # (R, S) 1 on tokens, 0 on padding; None if no mask is needed beyond the causal one
    position_ids: Tensor | None  # (R, S) positions, starting from 0 at each row's first token; None for the default positions
    predicts: Tensor  # (R, S) bool: positions whose next token the model chose
    kept: KeptSets | None = None  # one set of kept tokens per True position of `predicts`; None for the whole vocabulary

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the model's forward pass."""
        names = ("input_ids", "attention_mask", "position_ids")
        return {"use_cache": False, **{name: getattr(self, name) for name in names}}

    def to(self, device: torch.device) -> ModelInputs:
        """Move the inputs to a device."""
        tensors = ((column.name, getattr(self, column.name)) for column in fields(self))
        return replace(self, **{name: tensor.to(device) for name, tensor in tensors if tensor is not None})


def padded(batch: Batch, rows: Tensor, pad_id: int, padding_side: PaddingSide = "right") -> ModelInputs:
    """Pad rows to the longest row's length. Right padding needs no attention mask, because attention is causal."""
    sequences = [batch.sequences[row] for row in rows.tolist()]
    sizes = torch.tensor([sequence.numel() for sequence in sequences])
    input_ids = pad_sequence(sequences, batch_first=True, padding_value=pad_id, padding_side=padding_side)
    width = input_ids.shape[1]
    starts = torch.arange(len(rows)) * width + (width - sizes if padding_side == "left" else 0)
    predicts = _predicts(batch, rows, starts, input_ids.numel()).view_as(input_ids)
    if padding_side == "right":
        return ModelInputs(input_ids, None, None, predicts, batch.kept_of(rows))
    attention_mask = (torch.arange(width) >= width - sizes[:, None]).long()
    position_ids = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    return ModelInputs(input_ids, attention_mask, position_ids, predicts, batch.kept_of(rows))


def packed(batch: Batch, rows: Tensor) -> ModelInputs:
    """Concatenate several rows into one without padding."""
    sequences = [batch.sequences[row] for row in rows.tolist()]
    sizes = torch.tensor([sequence.numel() for sequence in sequences])
    positions = torch.cat([torch.arange(size) for size in sizes.tolist()])
    predicts = _predicts(batch, rows, sizes.cumsum(0) - sizes, int(sizes.sum()))
    return ModelInputs(torch.cat(sequences)[None], None, positions[None], predicts[None], batch.kept_of(rows))


def _predicts(batch: Batch, rows: Tensor, starts: Tensor, number: int) -> Tensor:
    """Return a bool mask ``(number,)`` of the flat positions that predict a token chosen by the model.

    Args:
        batch: the batch.
        rows: ``(R,)``.
        starts: ``(R,)`` flat position of each row's first token.
        number: number of flat positions.
    """
    row, place = batch.response_mask[rows].nonzero(as_tuple=True)
    predicts = torch.zeros(number, dtype=torch.bool)
    predicts[starts[row] + batch.prompt_lengths[rows][row] + place - 1] = True
    return predicts


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows for one forward pass."""

    rows: Tensor
    learns: bool  # whether a backward pass follows
    is_idle: bool = False


class MicroBatches:
    """Splits rows into micro-batches, distributes them among processes, and runs the model on them.

    Each process holds the whole batch.
    """

    def __init__(self, accelerator: Accelerator, model: PreTrainedModel, config: LearnerConfig, *, pad_id: int) -> None:
        is_cpu, sizes = accelerator.device.type == "cpu", model.config.get_text_config()
        depth = (getattr(sizes, "num_hidden_layers", None) or 12) * (getattr(sizes, "hidden_size", None) or 768)
        self.accelerator = accelerator
        self.pad_id = pad_id
        self.max_tokens = max_tokens(config.max_tokens_per_micro_batch, is_cpu=is_cpu, depth=depth)
        if config.packing:  # some models fail on passes longer than their context, even if each row is shorter
            self.max_tokens = min(self.max_tokens, context_length(model) or self.max_tokens)
        # on a CPU, the overhead of calling a small model takes as long as hundreds of tokens
        self.overhead = 48 + 2**16 // depth if is_cpu else 256
        self.packing, self.autocasts = config.packing, config.autocast == "bfloat16"
        self.switch = rotary_switch(model)
        self.keeps_lengths_apart = False  # True if computing rows of different lengths together changes their log-probs
        self.padding_side: PaddingSide = "right"

    def of(self, batch: Batch, rows: Tensor, *, learns: bool = False) -> list[MicroBatch]:
        """Return this process's micro-batches, followed by idle micro-batches until every process has the same number.

        The numbers must match because collective operations in a pass wait for all processes.
        """
        if not len(rows):
            return []
        sizes = batch.sizes
        shares = deal(rows, sizes, self.accelerator.num_processes)
        cuts = [self._cut(sizes, share) for share in shares]
        of_process = [MicroBatch(cut, learns) for cut in cuts[self.accelerator.process_index]]
        shortest = torch.tensor([min(rows.tolist(), key=sizes.__getitem__)])
        return of_process + [MicroBatch(shortest, learns, is_idle=True)] * (max(map(len, cuts)) - len(of_process))

    def _cut(self, sizes: Sequence[int], rows: Tensor) -> list[Tensor]:
        """Split rows into micro-batches whose rows the model can compute together."""
        lengths = torch.tensor(sizes)[rows]
        groups = lengths if self.keeps_lengths_apart else lengths > (self.switch or math.inf)
        alike = [rows[groups == group] for group in torch.unique(groups).flip(0)]
        cuts = [cut(sizes, group, self.max_tokens, packing=self.packing, overhead=self.overhead) for group in alike]
        return list(chain.from_iterable(cuts))

    def forward(self, model: nn.Module, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Compute differentiable log-probs and entropies, ``(R, T)`` each, for the given rows, with 0 outside the mask."""
        inputs = packed(batch, rows) if self.packing else padded(batch, rows, self.pad_id, self.padding_side)
        log_probs, entropy = model(inputs.to(self.accelerator.device))
        return batch.scatter(rows, log_probs), batch.scatter(rows, entropy)

    @torch.no_grad()
    def log_probs(
        self, model: nn.Module, batch: Batch, micro_batches: Sequence[MicroBatch] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute log-probs and entropies, ``(B, T)`` each and on the CPU, for the given micro-batches or for all rows.

        The result contains the rows of all processes. It is 0 for rows that are not in any micro-batch.
        """
        scores = torch.zeros(2, *batch.response_mask.shape)
        for micro_batch in self.of(batch, torch.arange(len(batch))) if micro_batches is None else micro_batches:
            log_probs, entropy = self.forward(model, batch, micro_batch.rows)
            if not micro_batch.is_idle:
                scores[:, micro_batch.rows] = torch.stack([log_probs, entropy]).float().cpu()
        scores = self.sum(scores)
        refuse_nan(scores[0])
        return scores[0], scores[1]

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor across processes. The result is on the CPU."""
        if self.accelerator.num_processes == 1:
            return tensor
        total: Tensor = self.accelerator.reduce(tensor.to(self.accelerator.device), reduction="sum")
        return total.cpu()

    def any(self, flag: bool) -> bool:
        """Return whether the flag is true on any process."""
        return bool(self.sum(torch.tensor(float(flag))))


def max_tokens(limit: int | None, *, is_cpu: bool, depth: int) -> int:
    """Return the maximum micro-batch size in tokens, chosen to keep a GPU busy or to fit in a CPU's cache.

    Args:
        limit: the configured limit, or None to choose one.
        is_cpu: whether the model is on a CPU.
        depth: number of layers times width. A larger model needs fewer tokens.
    """
    return limit or (max(512, min(3072, 2**24 // depth)) if is_cpu else 16384)


def cut(sizes: Sequence[int], rows: Tensor, max_tokens: int, *, packing: bool = False, overhead: int = 256) -> list[Tensor]:
    """Split rows into micro-batches of at most ``max_tokens`` tokens, longest first. A single row may exceed the limit.

    A padded micro-batch has ``rows x longest row`` tokens. The number of tokens in a packed micro-batch is the sum of the
    rows' lengths.

    Args:
        sizes: number of tokens in every row of the batch.
        rows: ``(R,)``.
        max_tokens: maximum number of tokens in a micro-batch.
        packing: whether rows are packed.
        overhead: measured fixed cost of a forward and backward pass, in tokens. A higher cost leads to fewer micro-batches.
    """
    by_size = sorted(rows.tolist(), key=sizes.__getitem__, reverse=True)
    lengths = [sizes[row] for row in by_size]
    numbers = _packed_numbers(lengths, max_tokens) if packing else _padded_numbers(lengths, max_tokens, overhead)
    return list(torch.split(torch.tensor(by_size, dtype=torch.long), list(numbers))) if by_size else []


def _packed_numbers(lengths: Sequence[int], max_tokens: int) -> Iterator[int]:
    """Yield the number of rows in each micro-batch, which takes as many rows as fit."""
    start = 0
    while start < len(lengths):
        number = max(1, sum(total <= max_tokens for total in accumulate(lengths[start:])))
        yield number
        start += number


def _padded_numbers(lengths: Sequence[int], max_tokens: int, overhead: int) -> Iterator[int]:
    """Yield the numbers of rows per micro-batch that minimise the total cost, using dynamic programming."""
    end = len(lengths)
    costs, numbers = [0.0] * (end + 1), [0] * end
    for start in range(end - 1, -1, -1):
        longest = lengths[start]
        most = max(1, min(end - start, max_tokens // longest))
        # among equal costs, prefer the larger micro-batch, so that the smallest comes last
        costs[start], negative = min((overhead + longest * n + costs[start + n], -n) for n in range(1, most + 1))
        numbers[start] = -negative
    start = 0
    while start < end:
        yield numbers[start]
        start += numbers[start]
