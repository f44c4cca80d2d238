"""Decoding with a transformers model: one pass per prompt however many responses it gets, and none for a response that ended.

Transformers computes the prompts and, but for the models that `fused` knows, the tokens after them; what is ours is the
cache, whose rows can leave, and the loop. `quickest_way` says how a model is decoded.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from rlzoo.acceleration import can_fuse, fused_step
from rlzoo.support.draws import draw

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rlzoo.fast_cpu.fused import FusedStep

CONVERSATION = 4096
"""Tokens of an episode for which positions are computed ahead. For a longer one they are recomputed."""

GROWTH = 1.5
"""How much larger a buffer becomes when it is full: what is copied stays proportional to what is written."""

logger = logging.getLogger("rlzoo")


@dataclass(frozen=True, slots=True)
class Decoded:
    """What was drawn."""

    tokens: Tensor  # (B, T) int64
    log_probs: Tensor  # (B, T) float32, of the distribution sampled from
    caches: Caches | None = None  # where they are kept for a next turn


@dataclass(frozen=True, slots=True)
class Caches:
    """The keys and values of episodes after a turn, by their places in the batch. The last token drawn is not among them."""

    layers: list[RowLayer]
    rows: dict[int, int]  # of the buffers
    spans: dict[int, tuple[int, int]]  # columns of the buffers, from the first token to behind the last
    step: FusedStep | None


def decode(
    model: PreTrainedModel,
    prompts: Sequence[tuple[int, ...]],
    uniforms: Tensor,
    *,
    end_ids: frozenset[int],
    pad_id: int,
    temperature: float,
    fuses: bool = False,
    places: Sequence[int] | None = None,
    caches: Caches | None = None,
) -> Decoded:
    """Draw a response to each prompt; equal prompts next to each other are computed once.

    Args:
        model: one that `quickest_way` decodes by rows, in evaluation mode.
        prompts: B token sequences.
        uniforms: float64 ``(B, T)`` in [0, 1): the random number of each token of each response, at most T of them.
        end_ids: tokens that end a response.
        pad_id: fills the rows behind their ends.
        temperature: logits are divided by it.
        fuses: whether tokens behind the prompt are computed by `FusedStep`, where `can_fuse` allows it.
        places: numbers of the prompts, if the caches are to be kept for a next turn under them.
        caches: of the turn before, in which every prompt begins with what was computed then.
    """
    limit = uniforms.shape[1]
    # what a model not known may keep from a forward pass, such as a mask, must serve for training too
    with torch.inference_mode() if fuses else torch.no_grad():
        numbers, ends = uniforms.t().contiguous().to(model.device), torch.tensor(sorted(end_ids), device=model.device)
        responses = OpenResponses(model, prompts, pad_id, limit, fuses=fuses, keeps=places is not None)
        if caches is not None:
            assert places is not None, "a turn that follows another is followed by others"
            responses = ResumedResponses(model, prompts, pad_id, limit, caches, places, fuses=fuses)
        tokens = torch.full((len(prompts), limit), pad_id, device=model.device)
        log_probs = torch.zeros(len(prompts), limit, device=model.device)
        logits = responses.first_logits()
        for column in range(limit):
            rows = responses.rows
            drawn, reported = draw(logits, numbers[column].index_select(0, rows), temperature)
            tokens[rows, column], log_probs[rows, column] = drawn, reported
            drawn = responses.close((drawn[:, None] == ends).any(dim=1), drawn)
            if not len(drawn) or column + 1 == limit:
                break
            logits = responses.next_logits(drawn)
        kept = None if places is None else responses.caches(places)
        return Decoded(tokens[:, : column + 1], log_probs[:, : column + 1], kept)


class OpenResponses:
    """The responses that have not ended, next to each other in the cache's first rows.

    Prompts are padded on the left, so all responses write the same column of the cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[tuple[int, ...]],
        pad_id: int,
        limit: int,
        *,
        fuses: bool = False,
        keeps: bool = False,
    ) -> None:
        """Make room; nothing is computed yet.

        Args:
            model: see `decode`.
            prompts: see `decode`.
            pad_id: see `decode`.
            limit: tokens of a response, at most.
            fuses: see `decode`.
            keeps: whether the cache of a response that ended is kept behind the open ones.
        """
        self.model = model
        self.device = model.device
        self._seat(len(prompts), keeps=keeps)
        runs = [(ids, len(list(run))) for ids, run in groupby(prompts)]
        self.repeats = torch.tensor([number for _, number in runs])  # (P,) responses of each prompt
        size = max(len(ids) for ids, _ in runs)
        self.input_ids = torch.tensor([[pad_id] * (size - len(ids)) + list(ids) for ids, _ in runs])
        self.attended = torch.tensor([[False] * (size - len(ids)) + [True] * len(ids) for ids, _ in runs])
        room = size + min(limit, size + 64)
        self.cache = Cache(layers=[RowLayer(self.repeats, room) for _ in DynamicCache(config=model.config).layers])
        lengths = self.attended.sum(dim=1, keepdim=True)
        self.positions = lengths.repeat_interleave(self.repeats, dim=0).to(self.device)  # of the next token
        self.first = size - self.positions[:, 0]  # (B,) column of each response's first token
        self.mask = self._mask(size + limit, fuses=fuses)
        self.step = fused_step(model, max(size + limit, CONVERSATION if keeps else 0)) if fuses else None

    def _seat(self, number: int, *, keeps: bool) -> None:
        self.keeps = keeps
        self.rows = torch.arange(number, device=self.device)  # open rows of the batch, in the cache's order
        self.seats = torch.arange(number, device=self.device)  # all rows of the batch, in the cache's order
        self.ends = torch.zeros(number, dtype=torch.long, device=self.device)  # columns of the cache when a row ended

    def _mask(self, columns: int, *, fuses: bool) -> Tensor | None:
        """What each response may look at, ``(B, 1, 1, columns)``; None: everything, as no prompt is padded."""
        if not bool(self.first.any()):
            return None
        mask = (torch.arange(columns, device=self.device) >= self.first[:, None])[:, None, None]
        return _added(mask, self.model.dtype) if self.model.config._attn_implementation == "eager" and not fuses else mask

    def first_logits(self) -> Tensor:
        """Logits ``(B, V)`` of each response's first token, from one pass over the prompts."""
        logits: Tensor = self.model(
            input_ids=self.input_ids.to(self.device),
            attention_mask=None if self.mask is None else self.attended.long().to(self.device),
            position_ids=(self.attended.long().cumsum(dim=1) - 1).clamp(min=0).to(self.device),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        return logits.repeat_interleave(self.repeats.to(self.device), dim=0)

    def next_logits(self, tokens: Tensor) -> Tensor:
        """Logits ``(B, V)`` after one more token ``(B,)`` of each response."""
        mask = None if self.mask is None else self.mask[..., : self.cache.get_seq_length() + 1]
        positions, self.positions = self.positions, self.positions + 1
        if self.step is not None:
            return self.step(tokens, positions[:, 0], self.cache.layers, mask)
        logits: Tensor = self.model(
            input_ids=tokens[:, None], attention_mask=mask, position_ids=positions, past_key_values=self.cache, use_cache=True
        ).logits
        return logits[:, -1]

    def close(self, ended: Tensor, tokens: Tensor) -> Tensor:
        """Remove the responses that ended, a bool ``(B,)``; returns the tokens ``(B,)`` of those that continue.

        The last ones move into the places of those that ended, so a response is copied at most once for each that ends.
        """
        num_open = len(ended) - int(ended.sum())
        if num_open == len(ended):
            return tokens
        self.ends[self.rows[ended]] = self.cache.get_seq_length()
        holes = ended[:num_open].nonzero()[:, 0]
        movers = (~ended[num_open:]).nonzero()[:, 0] + num_open
        order = torch.arange(len(ended), device=self.device)
        order[holes], order[movers] = movers, holes
        for layer in self.cache.layers:
            layer.keep(num_open, movers, holes, swaps=self.keeps)
        self.seats[: len(ended)] = self.seats[: len(ended)][order]
        order = order[:num_open]
        self.rows, self.positions = self.rows[order], self.positions[order]
        if self.mask is not None:
            self.mask = self.mask[order]
        return tokens[order]

    def caches(self, places: Sequence[int]) -> Caches:
        """What is kept for a next turn, by the rows' places."""
        self.ends[self.rows] = self.cache.get_seq_length()
        spans = zip(self.first.tolist(), self.ends.tolist(), strict=True)
        rows = {places[row]: seat for seat, row in enumerate(self.seats.tolist())}
        return Caches(self.cache.layers, rows, dict(zip(places, spans, strict=True)), self.step)


class ResumedResponses(OpenResponses):
    """Responses whose first tokens were computed in the turn before. The others are computed in one pass.

    The tokens of each row end in the same column, so that again all rows write the same column of the cache.
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
    ) -> None:
        """Lay out what was kept; see `OpenResponses`.

        Args:
            model: see `decode`.
            contexts: all tokens so far.
            pad_id: see `decode`.
            limit: tokens of a turn, at most.
            caches: of the turn before.
            places: of the contexts, in the caches.
            fuses: see `decode`.
        """
        self.model = model
        self.device = device = model.device
        self._seat(len(contexts), keeps=True)
        starts, ends = torch.tensor([caches.spans[place] for place in places], device=device).T
        known = ends - starts  # (B,) tokens that are in the caches
        sizes = torch.tensor([len(ids) for ids in contexts], device=device)
        new = sizes - known
        before, width = int(known.max()), int(new.max())
        size = before + width
        self.first = size - sizes
        chunks = [ids[number:] for ids, number in zip(contexts, known.tolist(), strict=True)]
        self.input_ids = torch.tensor([[pad_id] * (width - len(ids)) + list(ids) for ids in chunks])
        self.attended = torch.arange(width, device=device) >= (width - new)[:, None]
        self.chunk_positions = known[:, None] + (torch.arange(width, device=device) - (width - new)[:, None]).clamp(min=0)
        self.positions = sizes[:, None]
        columns = torch.arange(size, device=device)
        source = columns - (self.first - starts)[:, None]  # where a column's token was
        source = torch.where((source >= starts[:, None]) & (source < ends[:, None]), source, 0)
        rows = torch.tensor([caches.rows[place] for place in places], device=device)
        room = size + min(limit, size + 64)
        self.cache = Cache(layers=[layer.resumed(rows, source, self.attended, room) for layer in caches.layers])
        self.mask = self._mask(size + limit, fuses=fuses)
        looks = (columns >= self.first[:, None])[:, None] & (columns <= before + torch.arange(width, device=device)[:, None])
        eager = model.config._attn_implementation == "eager"
        self.chunk_mask = _added(looks[:, None], model.dtype) if eager else looks[:, None]
        self.step = caches.step
        if fuses and (self.step is None or len(self.step.cos) < size + limit):
            self.step = fused_step(model, 2 * (size + limit))

    def first_logits(self) -> Tensor:
        """Logits ``(B, V)`` of each response's next token, from one pass over what is new."""
        logits: Tensor = self.model(
            input_ids=self.input_ids.to(self.device),
            attention_mask=self.chunk_mask,
            position_ids=self.chunk_positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        return logits[:, -1]


class RowLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    """Keys and values of one layer: a row for each open response, a column for each token, in buffers with room for more.

    The first update is the prompts', each of which is then repeated for its responses.
    """

    def __init__(self, repeats: Tensor, room: int) -> None:
        super().__init__()
        self.repeats = repeats  # (P,) responses of each prompt
        self.num_rows = int(repeats.sum())
        self.room = room  # columns at first
        self.length = 0  # columns in use
        self.written: Tensor | None = None  # (B, W) where the next update writes; None: everywhere

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Keep the prompts' ``(P, H, S, D)``, a copy for each of their responses."""
        repeats = self.repeats.to(key_states.device)
        both = (each.repeat_interleave(repeats, dim=0) for each in (key_states, value_states))
        self.keys, self.values = map(self._with_room, both)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append a column ``(B, H, 1, D)``; returns all of them, ``(B, H, T, D)``."""
        start, self.length = self.length, self.length + key_states.shape[-2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            return key_states, value_states
        rows = self.num_rows
        if self.written is not None:
            where, self.written = self.written[:, None, :, None], None
            key_states = torch.where(where, key_states, self.keys[:rows, :, start : self.length])
            value_states = torch.where(where, value_states, self.values[:rows, :, start : self.length])
        if self.length > self.keys.shape[-2]:
            self.room = int(self.length * GROWTH)
            self.keys, self.values = (self._with_room(each[:rows, :, :start]) for each in (self.keys, self.values))
        self.keys[:rows, :, start : self.length] = key_states
        self.values[:rows, :, start : self.length] = value_states
        return self.keys[:rows, :, : self.length], self.values[:rows, :, : self.length]

    def _with_room(self, states: Tensor) -> Tensor:
        rows, heads, columns, size = states.shape
        buffer = states.new_empty(rows, heads, max(self.room, columns), size)
        buffer[:, :, :columns] = states
        return buffer

    def keep(self, num_rows: int, movers: Tensor, holes: Tensor, *, swaps: bool = False) -> None:
        """Keep the first rows, some of them replaced by others from behind, which take their places if they swap."""
        self.num_rows = num_rows
        if len(movers):
            for buffer in (self.keys, self.values):
                ended = buffer[holes, :, : self.length] if swaps else None
                buffer[holes, :, : self.length] = buffer[movers, :, : self.length]
                if ended is not None:
                    buffer[movers, :, : self.length] = ended

    def resumed(self, rows: Tensor, source: Tensor, written: Tensor, room: int) -> RowLayer:
        """A layer with some of the rows, in which column t holds what was in column ``source[row, t]``.

        Args:
            rows: ``(B,)`` of this layer.
            source: ``(B, S)``.
            written: ``(B, W)`` which of the last W columns the next update writes; it is W tokens wide.
            room: columns at first.
        """
        layer = RowLayer(torch.ones(len(rows), dtype=torch.long), room)
        index = source[:, None, :, None].expand(-1, self.keys.shape[1], -1, self.keys.shape[3])
        both = (each[rows, :, : self.length].gather(2, index.clamp(max=self.length - 1)) for each in (self.keys, self.values))
        layer.keys, layer.values = map(layer._with_room, both)
        layer.length, layer.written, layer.is_initialized = source.shape[1] - written.shape[1], written, True
        return layer

    def get_seq_length(self) -> int:
        """Columns in use."""
        return self.length


Way = Literal["fused", "rows", "generate"]
"""How a model's responses are decoded: rows by `FusedStep`, rows by the model's own forward, or transformers' `generate`."""


def quickest_way(model: PreTrainedModel) -> Way:
    """The quickest way that gives the model's own log-probabilities, tried on two prompts."""
    layers = DynamicCache(config=model.config).layers
    if all(type(layer) is DynamicLayer for layer in layers) and model.config._attn_implementation in ("eager", "sdpa"):
        if can_fuse(model) and _agrees(model, fuses=True):
            return "fused"
        if _agrees(model, fuses=False):
            return "rows"
    logger.warning("%s cannot be decoded row by row; sampling with transformers' generate", type(model).__name__)
    return "generate"


@torch.no_grad()
def _agrees(model: PreTrainedModel, *, fuses: bool) -> bool:
    size = model.config.get_text_config().vocab_size
    prompts = [tuple((start + 1) % size for start in range(3)), tuple((7 * start + 2) % size for start in range(5))]
    numbers = torch.tensor([[0.3, 0.6, 0.9], [0.5, 0.2, 0.7]], dtype=torch.float64)
    was_training = model.training
    model.eval()
    try:
        ours = decode(model, prompts, numbers, end_ids=frozenset(), pad_id=0, temperature=1.0, fuses=fuses)
        theirs = [_plain_log_probs(model, prompt, tokens) for prompt, tokens in zip(prompts, ours.tokens, strict=True)]
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
        logger.warning("%s: %s", type(model).__name__, error)
        return False
    finally:
        model.train(was_training)
    return torch.allclose(ours.log_probs, torch.stack(theirs), rtol=0, atol=0.1 if model.dtype == torch.bfloat16 else 1e-3)


def _plain_log_probs(model: PreTrainedModel, prompt: tuple[int, ...], tokens: Tensor) -> Tensor:
    """Log-probabilities ``(T,)`` of tokens behind a prompt, in one pass without a cache."""
    sequence = torch.cat([torch.tensor(prompt, device=model.device), tokens])
    logits = model(input_ids=sequence[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    log_probs: Tensor = logits.float().log_softmax(dim=-1)
    return log_probs.gather(-1, tokens[:, None])[:, 0]


def _added(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as eager attention takes it: what is added to the scores."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, torch.finfo(dtype).min)
