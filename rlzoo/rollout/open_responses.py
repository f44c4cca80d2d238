"""The open responses of a batch with their keys and values, stored in rows that can be removed."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from rlzoo.models.acceleration import fused_step

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rlzoo.models.fast_cpu.fused import FusedStep

CONVERSATION = 4096
"""Number of positions whose rotary embeddings are precomputed for a conversation. Longer episodes need new embeddings."""

COLUMNS = 256
"""Attention reads a multiple of this number of columns in the cache, so that few graphs are captured."""


def rounded(columns: int) -> int:
    """Round a number of columns up to a multiple of `COLUMNS`."""
    return -(-columns // COLUMNS) * COLUMNS


@dataclass(frozen=True, slots=True)
class Caches:
    """Keys and values of episodes after a turn, without the last drawn token. The dicts are keyed by index in the batch."""

    layers: list[RowLayer]
    rows: dict[int, int]  # row in the buffers
    spans: dict[int, tuple[int, int]]  # start column and (exclusive) end column in the buffers
    step: FusedStep | None


class OpenResponses:
    """Responses that have not ended, stored in the first rows of the cache.

    Prompts are padded on the left so that all responses write to the same column of the cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[tuple[int, ...]],
        pad_id: int,
        limit: int,
        *,
        fuses: bool = False,
        graphs: bool = False,
        keeps: bool = False,
    ) -> None:
        """Allocate the buffers without computing anything.

        Args:
            model: see `decode`.
            prompts: see `decode`.
            pad_id: see `decode`.
            limit: maximum number of tokens in a response.
            fuses: see `decode`.
            graphs: see `decode`.
            keeps: whether the caches of ended responses are kept, in the rows after the open responses.
        """
        self._seat(model, len(prompts), keeps=keeps)
        runs = [(ids, len(list(run))) for ids, run in groupby(prompts)]
        self.repeats = torch.tensor([number for _, number in runs])  # (P,) number of responses to each prompt
        size = max(len(ids) for ids, _ in runs)
        self.input_ids = torch.tensor([[pad_id] * (size - len(ids)) + list(ids) for ids, _ in runs])
        self.attended = torch.tensor([[False] * (size - len(ids)) + [True] * len(ids) for ids, _ in runs])
        room = rounded(size + limit) if graphs else size + limit
        self.layers = [RowLayer(self.repeats, room) for _ in DynamicCache(config=model.config).layers]
        self.cache = Cache(layers=list(self.layers))
        lengths = self.attended.sum(dim=1, keepdim=True)
        self.positions = lengths.repeat_interleave(self.repeats, dim=0).to(self.device)  # position of the next token
        self.first = size - self.positions[:, 0]  # (B,) column of each response's first token
        self.mask = self._mask(room, fuses=fuses)
        self.first_mask = None if self.mask is None else self.attended.long().to(self.device)
        self.first_positions = (self.attended.long().cumsum(dim=1) - 1).clamp(min=0).to(self.device)
        self.step = fused_step(model, max(size + limit, CONVERSATION if keeps else 0)) if fuses else None

    def _seat(self, model: PreTrainedModel, number: int, *, keeps: bool) -> None:
        self.model, self.cache_name, self.device = model, cache_name(model), model.device
        self.keeps = keeps
        self.rows = torch.arange(number, device=self.device)  # batch indices of the open responses, in cache order
        self.seats = torch.arange(number, device=self.device)  # batch indices of all responses, in cache order
        self.ends = torch.zeros(number, dtype=torch.long, device=self.device)  # number of columns when each response ended

    def _mask(self, columns: int, *, fuses: bool) -> Tensor | None:
        """Return the attention mask, ``(B, 1, 1, columns)``, or None if no prompt is padded."""
        if not bool(self.first.any()):
            return None
        mask = (torch.arange(columns, device=self.device) >= self.first[:, None])[:, None, None]
        return _added(mask, self.model.dtype) if self.model.config._attn_implementation == "eager" and not fuses else mask

    def first_logits(self) -> Tensor:
        """Compute the logits ``(B, V)`` of each response's next token in one pass over the tokens that are not cached."""
        logits: Tensor = self.model(
            input_ids=self.input_ids.to(self.device),
            attention_mask=self.first_mask,
            position_ids=self.first_positions,
            use_cache=True,
            **{self.cache_name: self.cache},
            logits_to_keep=1,
        ).logits[:, -1]
        return logits.repeat_interleave(self.repeats.to(self.device), dim=0, output_size=len(self.rows))

    def next_logits(self, tokens: Tensor) -> Tensor:
        """Append one token ``(B,)`` to each response and compute the logits ``(B, V)`` for the next token."""
        mask = None if self.mask is None else self.mask[..., : self.cache.get_seq_length() + 1]
        positions, self.positions = self.positions, self.positions + 1
        if self.step is not None:
            return self.step(tokens, positions[:, 0], self.layers, mask)
        logits: Tensor = self.model(
            input_ids=tokens[:, None],
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            **{self.cache_name: self.cache},
        ).logits
        return logits[:, -1]

    def close(self, ended: Tensor, tokens: Tensor) -> Tensor:
        """Remove the responses where ``ended`` ``(B,)`` is True and return the tokens ``(B, ...)`` of the other responses.

        The last responses move into the freed rows, so at most one response is copied for each response that ends.
        """
        num_open = len(ended) - int(ended.sum())
        if num_open == len(ended):
            return tokens
        self._mark_ends(ended)
        holes = ended[:num_open].nonzero()[:, 0]
        movers = (~ended[num_open:]).nonzero()[:, 0] + num_open
        order = torch.arange(len(ended), device=self.device)
        order[holes], order[movers] = movers, holes
        for layer in self.layers:
            layer.keep(num_open, movers, holes, swaps=self.keeps)
        self.seats[: len(ended)] = self.seats[: len(ended)][order]
        order = order[:num_open]
        self.rows, self.positions = self.rows[order], self.positions[order]
        if self.mask is not None:
            self.mask = self.mask[order]
        return tokens[order]

    def _mark_ends(self, ended: Tensor) -> None:
        """Store the number of columns that the ended responses use, because `StaticSteps` keeps writing further columns."""
        index = ended.nonzero()[:, 0]
        rows = self.rows[index]
        self.ends[rows] = self.first[rows] + self.positions[index, 0]

    def caches(self, places: Sequence[int]) -> Caches:
        """Return the caches for the next turn, keyed by the indices in ``places``."""
        self._mark_ends(torch.ones_like(self.rows, dtype=torch.bool))
        spans = zip(self.first.tolist(), self.ends.tolist(), strict=True)
        rows = {places[row]: seat for seat, row in enumerate(self.seats.tolist())}
        return Caches(self.layers, rows, dict(zip(places, spans, strict=True)), self.step)


class ResumedResponses(OpenResponses):
    """Responses that continue from cached earlier turns. One pass computes the new tokens.

    The tokens of all rows end in the same column, so all rows write to the same column of the cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        contexts: Sequence[tuple[int, ...]],
        pad_id: int,
        limit: int,
        caches: Caches,
        places: Sequence[int],
        *,
        fuses: bool = False,
        graphs: bool = False,
    ) -> None:
        """Copy the kept caches into new buffers; see `OpenResponses`.

        Args:
            model: see `decode`.
            contexts: all tokens of each episode so far.
            pad_id: see `decode`.
            limit: maximum number of tokens in a turn.
            caches: caches from the previous turn.
            places: index of each context in the caches.
            fuses: see `decode`.
            graphs: see `decode`.
        """
        self._seat(model, len(contexts), keeps=True)
        device = self.device
        self.repeats = torch.ones(len(contexts), dtype=torch.long)
        starts, ends = torch.tensor([caches.spans[place] for place in places], device=device).T
        known = ends - starts  # (B,) number of tokens in the caches
        sizes = torch.tensor([len(ids) for ids in contexts], device=device)
        new = sizes - known
        before, width = int(known.max()), int(new.max())
        size = before + width
        self.first = size - sizes
        chunks = [ids[number:] for ids, number in zip(contexts, known.tolist(), strict=True)]
        self.input_ids = torch.tensor([[pad_id] * (width - len(ids)) + list(ids) for ids in chunks])
        self.attended = torch.arange(width, device=device) >= (width - new)[:, None]
        self.first_positions = known[:, None] + (torch.arange(width, device=device) - (width - new)[:, None]).clamp(min=0)
        self.positions = sizes[:, None]
        columns = torch.arange(size, device=device)
        source = columns - (self.first - starts)[:, None]  # each column's position in the old cache
        source = torch.where((source >= starts[:, None]) & (source < ends[:, None]), source, 0)
        rows = torch.tensor([caches.rows[place] for place in places], device=device)
        room = rounded(size + limit) if graphs else size + limit
        self.layers = [layer.resumed(rows, source, self.attended, room) for layer in caches.layers]
        self.cache = Cache(layers=list(self.layers))
        self.mask = self._mask(room, fuses=fuses)
        looks = (columns >= self.first[:, None])[:, None] & (columns <= before + torch.arange(width, device=device)[:, None])
        eager = model.config._attn_implementation == "eager"
        self.first_mask = _added(looks[:, None], model.dtype) if eager else looks[:, None]
        self.step = caches.step
        if fuses and (self.step is None or len(self.step.cos) < size + limit):
            self.step = fused_step(model, 2 * (size + limit))


def cache_name(model: PreTrainedModel) -> str:
    """Return the name of the cache argument of the model's ``forward``, which transformers 5.24 renamed."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # the model without its adapter
    return "cache" if "cache" in inspect.signature(inner.forward).parameters else "past_key_values"


class RowLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    """Keys and values of one layer, with one row per open response and one column per token.

    The first update has one row per prompt, which is repeated for each response to the prompt.
    """

    def __init__(self, repeats: Tensor, room: int) -> None:
        super().__init__()
        self.repeats = repeats  # (P,) number of responses to each prompt
        self.num_rows = int(repeats.sum())
        self.room = room  # number of columns, all allocated at once because a growing buffer would fragment a GPU's memory
        self.length = 0  # number of columns in use
        self.written: Tensor | None = None  # (B, W), True where the next update writes; None for everywhere
        self.column: Tensor | None = None  # see `write_at`
        self.width = 0  # number of columns that an update returns after `write_at`

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Store the prompts' states ``(P, H, S, D)``, repeated for each response."""
        repeats, number = self.repeats.to(key_states.device), self.num_rows  # without the number, the host waits for the GPU
        both = (states.repeat_interleave(repeats, dim=0, output_size=number) for states in (key_states, value_states))
        self.keys, self.values = map(self._with_room, both)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append W columns ``(B, H, W, D)`` and return all columns ``(B, H, T, D)``."""
        if self.column is not None:
            both = (self.keys[: self.num_rows], self.values[: self.num_rows])
            for buffer, states in zip(both, (key_states, value_states), strict=True):
                buffer.index_copy_(2, self.column, states.to(buffer.dtype))
            return both[0][:, :, : self.width], both[1][:, :, : self.width]
        start, self.length = self.length, self.length + key_states.shape[-2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            return key_states, value_states
        rows = self.num_rows
        if self.written is not None:
            where, self.written = self.written[:, None, :, None], None
            key_states = torch.where(where, key_states, self.keys[:rows, :, start : self.length])
            value_states = torch.where(where, value_states, self.values[:rows, :, start : self.length])
        self.keys[:rows, :, start : self.length] = key_states
        self.values[:rows, :, start : self.length] = value_states
        return self.keys[:rows, :, : self.length], self.values[:rows, :, : self.length]

    def write_at(self, column: Tensor) -> None:
        """Make updates write the column whose index is in the tensor ``column`` ``(1,)`` and return the first `width` columns.

        The caller changes `width` and `length` and masks the unused columns. This method sets the unused columns to 0, because
        a NaN in them would spread even with an attention weight of 0.
        """
        self.column = column
        for buffer in (self.keys, self.values):
            buffer[:, :, self.length :] = 0

    def _with_room(self, states: Tensor) -> Tensor:
        rows, heads, columns, size = states.shape
        buffer = states.new_empty(rows, heads, max(self.room, columns), size)
        buffer[:, :, :columns] = states
        return buffer

    def keep(self, num_rows: int, movers: Tensor, holes: Tensor, *, swaps: bool = False) -> None:
        """Move the rows ``movers`` to ``holes`` (or swap the two), and then keep only the first ``num_rows`` rows."""
        self.num_rows = num_rows
        if len(movers):
            for buffer in (self.keys, self.values):
                ended = buffer[holes, :, : self.length] if swaps else None
                buffer[holes, :, : self.length] = buffer[movers, :, : self.length]
                if ended is not None:
                    buffer[movers, :, : self.length] = ended

    def resumed(self, rows: Tensor, source: Tensor, written: Tensor, room: int) -> RowLayer:
        """Return a layer with the given rows whose column t is column ``source[row, t]`` of this layer.

        Args:
            rows: ``(B,)`` rows of this layer.
            source: ``(B, S)`` columns of this layer to copy.
            written: ``(B, W)`` bool, True for those of the last W columns that the next update, of W tokens, writes.
            room: number of columns in the new layer.
        """
        layer = RowLayer(torch.ones(len(rows), dtype=torch.long), room)
        index = source[:, None, :, None].clamp(max=self.length - 1)
        both = (
            states[rows, :, : self.length].gather(2, index.expand(-1, states.shape[1], -1, states.shape[3]))
            for states in (self.keys, self.values)
        )
        layer.keys, layer.values = map(layer._with_room, both)
        layer.length, layer.written, layer.is_initialized = source.shape[1] - written.shape[1], written, True
        return layer

    def get_seq_length(self) -> int:
        """Return the number of columns in use."""
        return self.length


def _added(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a mask to the additive form that eager attention needs."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, torch.finfo(dtype).min)
