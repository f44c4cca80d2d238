"""The base class of samplers and the sampler for transformers models."""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from rlzoo.core.errors import UserError
from rlzoo.models.acceleration import can_fuse
from rlzoo.models.pretrained import context_length
from rlzoo.models.probe import (
    MODEL_ERRORS,
    Probe,
    evaluation_mode,
    excess,
    noise_of,
    plain_log_probs,
    precision,
    rotary_switch,
)
from rlzoo.rollout.decode import Decoded, Way, decode, possible_ways
from rlzoo.rollout.draws import OwnDraws, Truncation, refuse_nan, row_uniforms
from rlzoo.rollout.kept import KeptSets
from rlzoo.rollout.open_responses import Caches
from rlzoo.rollout.prompts import encode_prompt
from rlzoo.rollout.types import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Ids = tuple[int, ...]

NUM_DRAWN = 16
"""Maximum number of tokens that are drawn after each prompt when a way of sampling is compared with the model."""

WAYS: dict[Way, str] = {
    "graph": "fused steps of constant shapes, in CUDA graphs on a GPU",
    "fused": "fused steps",
    "rows": "row by row",
    "generate": "transformers' generate",
    "equal": "transformers' generate, prompts of equal length together",
    "plain": "passes over whole rows, prompts of equal length together",
}

RESUMED: tuple[Way, ...] = ("graph", "fused", "rows")
"""Ways that keep keys and values between turns."""

logger = logging.getLogger("rlzoo")


class Drawn(NamedTuple):
    """Tokens of one response, including any after the first end token, which are cut off later.

    Example:
        ``Drawn(tokens=[10, 14, 1], log_probs=[-0.1, -0.2, -0.9])``
    """

    tokens: Sequence[int]
    log_probs: Sequence[float]
    kept: KeptSets | None = None  # one set per token, at least up to the first end token; None without truncation
    versions: Sequence[int] = ()  # version of the weights for each token; empty if the caller knows the version


@dataclass(frozen=True, slots=True)
class Draws:
    """Settings for one draw. Equal settings and weights give equal tokens."""

    seed: int
    rows: Sequence[int]  # row numbers in the whole batch; each row has its own random numbers
    limit: int  # maximum number of tokens in a turn
    temperature: float = 1.0  # divisor of the logits
    turn: int = 0  # counted from 0; each turn has its own random numbers
    truncation: Truncation | None = None  # None for the whole distribution


class Sampler(ABC):
    """Draws responses to prompts with the current weights."""

    needs_weights = False
    """Whether the sampler has its own weights, which `update_weights` replaces. Otherwise, it reads the trained model."""
    in_flight = False
    """Whether several threads may call `sample` at once and `update_weights` may be called while they sample."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        end_ids: frozenset[int],
        max_new_tokens: int,
        batch_size: int = 256,
        chat_template: bool = False,
    ) -> None:
        """Store the settings.

        Args:
            model: the trained model.
            tokenizer: its tokenizer.
            end_ids: tokens that end a response.
            max_new_tokens: maximum number of tokens in a response.
            batch_size: maximum number of responses sampled at once.
            chat_template: whether prompts are wrapped in the tokenizer's chat template.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.end_ids = end_ids
        self.max_new_tokens = max_new_tokens
        self.batch_size = batch_size
        self.chat_template = chat_template
        self._tokenizing = threading.Lock()  # a tokenizer must not be used in two threads at once
        self._unread = end_ids | {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}

    @property
    def context(self) -> int:
        """The model's context length in tokens, including the prompt."""
        return context_length(self.model) or 2**31

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[str],
        samples: int,
        *,
        seed: int,
        temperature: float = 1.0,
        truncation: Truncation | None = None,
        policy_version: int = 0,
        first_row: int = 0,
    ) -> list[Rollout]:
        """Draw ``samples`` responses to each prompt. Responses to the same prompt are consecutive.

        Args:
            prompts: texts, before the chat template is applied.
            samples: number of responses per prompt.
            seed: random seed. Equal seeds and weights give equal responses. The global random state does not change.
            temperature: sampling temperature.
            truncation: top-k and top-p; None samples from the whole distribution.
            policy_version: version number to record in every rollout.
            first_row: index of the first response in the batch of all processes, which offsets the random numbers.
        """
        with self._tokenizing:
            encoded = [encode_prompt(self.tokenizer, prompt, self.chat_template) for prompt in prompts]
        rows = [ids for ids in encoded for _ in range(samples)]
        numbers = range(first_row, first_row + len(rows))
        draws = Draws(seed, numbers, self.max_new_tokens, temperature, truncation=truncation)
        drawn = self.draw(rows, draws)
        self.rest()
        with self._tokenizing:
            return [self._rollout(ids, response, policy_version) for ids, response in zip(rows, drawn, strict=True)]

    def _rollout(self, prompt_ids: Ids, drawn: Drawn, policy_version: int) -> Rollout:
        """Cut the response after its first end token, which is kept even if it is the padding token."""
        response_ids, finished = self.ended(drawn)
        versions = tuple(drawn.versions[: len(response_ids)])
        return Rollout(
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            rollout_log_probs=tuple(drawn.log_probs[: len(response_ids)]),
            text=self.text(response_ids),
            finished=finished,
            policy_version=versions[0] if versions else policy_version,
            kept=None if drawn.kept is None else drawn.kept.first(len(response_ids)),
            token_versions=versions if len(set(versions)) > 1 else (),
        )

    def ended(self, drawn: Drawn) -> tuple[Ids, bool]:
        """Return the tokens up to and including the first end token, and whether there is one. See also `refuse_nan`."""
        end = next((place + 1 for place, token in enumerate(drawn.tokens) if token in self.end_ids), None)
        refuse_nan(torch.tensor(drawn.log_probs[:end]))
        return tuple(drawn.tokens[:end]), end is not None

    def text(self, ids: Sequence[int]) -> str:
        """Decode tokens to text, without padding or the tokens that begin or end a text.

        Other special tokens are kept, because rewards and tool calls depend on tokens such as ``<answer>`` and ``<tool_call>``.
        """
        read = [token for token in ids if token not in self._unread]
        return str(self.tokenizer.decode(read, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @abstractmethod
    def draw(self, rows: Sequence[Ids], draws: Draws) -> Sequence[Drawn]:
        """Continue each row of tokens up to an end token or the limit. The caller calls `rest` afterwards."""

    def rest(self) -> None:  # noqa: B027  # not abstract, because most samplers hold nothing
        """Release memory that is held between turns."""

    def draw_turn(self, contexts: Mapping[int, Ids], draws: Draws, caches: Caches | None = None) -> tuple[list[Drawn], Any]:
        """Draw a turn for each open episode. The caller calls `rest` after the last turn.

        This method works with every sampler, because it passes the whole episode to the sampler in every turn. vLLM reuses
        earlier computation through its prefix cache.

        Args:
            contexts: all tokens of each open episode so far, keyed by its index in the batch. They start with the tokens that
                were passed for the previous turn.
            draws: settings for these episodes, in the same order.
            caches: the second result of the previous turn; None in the first turn.
        """
        return list(self.draw(list(contexts.values()), draws)), None

    @abstractmethod
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int = 0) -> None:
        """Replace the weights. Names and shapes match the model's ``state_dict``.

        Args:
            weights: names and tensors.
            version: version of the weights, in optimizer steps.
        """

    def close(self) -> None:  # noqa: B027  # as `rest`
        """Release resources outside this process's memory."""


class HFSampler(Sampler):
    """Samples with a transformers model, using `decode` or transformers' `generate`. Responses include the end token."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        own_weights: bool = False,
        way: Way | None = None,
        graphs: Literal["auto", "on", "off"] = "auto",
        device: torch.device | None = None,
        probe: Probe | None = None,
        **common: Any,
    ) -> None:
        """Choose the fastest way of decoding that gives the model's log-probs. See also `Sampler`.

        Args:
            model: see `Sampler`.
            tokenizer: see `Sampler`.
            own_weights: whether to sample from a copy of the model.
            way: the only way to try, or "generate" to try it and the slower ways.
            graphs: see ``rollout.graphs``. It has no effect if ``way`` is set.
            device: device of the copy.
            probe: a probe of the model, whose longest row limits the length at which ways are compared; None creates a probe.
            common: see `Sampler`.

        Raises:
            UserError: no way gives the model's log-probs, or the way for ``graphs="on"`` does not.
        """
        if own_weights:
            model = copy.deepcopy(model).requires_grad_(False).to(device or model.device)
        super().__init__(model, tokenizer, **common)
        self.needs_weights = own_weights
        self._switch = rotary_switch(self.model) or 0
        ways, failed = possible_ways(self.model, graphs if way is None else "auto"), []
        if not ways:
            raise UserError(f"rollout.graphs=on: {type(self.model).__name__} has no fused steps; set rollout.graphs=auto")
        if way is not None:
            ways = ways[ways.index("generate") :] if way == "generate" else (way,)
        elif "rows" not in ways and graphs != "on":
            failed.append(f"{WAYS['rows']}: its cache holds more than keys and values, or its attention is not torch's")
        self.way = self._agreeing_way(ways, failed, max((probe or Probe.of(self.model)).rows, key=len))

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int = 0) -> None:
        """Copy the weights into the sampler's own model."""
        assert self.needs_weights, "this sampler reads the trained model"
        state = self.model.state_dict()
        with torch.no_grad():
            for name, tensor in weights:
                state[name].copy_(tensor)

    def draw(self, rows: Sequence[Ids], draws: Draws) -> list[Drawn]:
        """See `Sampler.draw`."""
        is_padded = self.way in (*RESUMED, "generate")
        lengths = [len(ids) > self._switch > 0 if is_padded else len(ids) for ids in rows]  # equal values are drawn together
        drawn: dict[int, Drawn] = {}
        ways = {"generate": self._generate, "equal": self._generate, "plain": self._pass_whole_rows}
        decode_rows = ways.get(self.way, self._decode)
        with self.plain_generation():
            for _, run in groupby(sorted(range(len(rows)), key=lengths.__getitem__), key=lengths.__getitem__):
                alike = list(run)
                for start in range(0, len(alike), self.batch_size):
                    places = alike[start : start + self.batch_size]
                    uniforms = row_uniforms(draws.seed, [draws.rows[place] for place in places], draws.limit, draws.turn)
                    decoded = decode_rows([rows[place] for place in places], uniforms, draws)
                    drawn |= zip(places, _drawn(decoded), strict=True)
        return [drawn[place] for place in range(len(rows))]

    def draw_turn(self, contexts: Mapping[int, Ids], draws: Draws, caches: Caches | None = None) -> tuple[list[Drawn], Any]:
        """See `Sampler.draw_turn`. The caches hold keys and values, so that each token is computed only once."""
        if self.way not in RESUMED:
            return super().draw_turn(contexts, draws)
        uniforms = row_uniforms(draws.seed, draws.rows, draws.limit, draws.turn)
        if caches is not None:  # rows that end in the same column may need more columns than the model has positions
            known = {place: caches.spans[place][1] - caches.spans[place][0] for place in contexts}
            width = max(known.values()) + max(len(ids) - known[place] for place, ids in contexts.items())
            caches = caches if width + draws.limit <= self.context else None
        with self.plain_generation():
            decoded = self._decode(list(contexts.values()), uniforms, draws, caches=caches, places=list(contexts))
        return _drawn(decoded), decoded.caches

    def _agreeing_way(self, ways: Sequence[Way], failed: list[str], reach: Ids) -> Way:
        """Return the first way that gives the model's log-probs in rows as long as ``reach``; log why faster ways failed."""
        name = type(self.model).__name__
        prompts, number = _uneven_prompts(reach)
        ends, self.end_ids = self.end_ids, frozenset()  # then all responses have the same length
        try:
            for self.way in ways:
                try:
                    nats = self._difference(prompts, number)
                except (*MODEL_ERRORS, ImportError) as error:
                    failed.append(f"{WAYS[self.way]}: {type(error).__name__}: {error}"[:200])
                    continue
                if not nats:
                    break
                failed.append(f"{WAYS[self.way]}: {nats:.2g} nats")
            else:
                raise UserError(
                    f"{name} does not give the same log-probs when it samples as in one pass over the row: "
                    f"{'; '.join(failed)}; use {'rollout.graphs=auto' if ways == ('graph',) else 'rollout.engine=vllm'}, "
                    "or another model"
                )
        finally:
            self.end_ids = ends
        if failed:
            text = "%s: sampling with %s; faster ways fail, or their log-probs differ from those of one pass over the row (%s)"
            logger.warning(text, name, WAYS[self.way], "; ".join(failed))
        return self.way

    def _difference(self, prompts: Sequence[Ids], number: int) -> float:
        """Return the first difference from plain passes that is too large, in nats, or 0 if there is none."""
        draws, caches = Draws(seed=0, rows=range(len(prompts)), limit=number), None
        for turn in range(2 if self.way in RESUMED else 1):
            drawn, caches = self.draw_turn(dict(enumerate(prompts)), replace(draws, turn=turn), caches)
            for ids, response in zip(prompts, drawn, strict=True):
                row = (*ids, *response.tokens)
                plain = plain_log_probs(self.model, row)
                compare = partial(excess, eps=precision(self.model), noise=partial(noise_of, self.model, row, plain))
                nats = compare(torch.tensor(response.log_probs), plain[len(ids) - 1 :])
                # if tokens depend on later ones, as they do near a rotary switch, there are no log-probs to compare with
                if nats and not compare(plain_log_probs(self.model, ids), plain[: len(ids) - 1]):
                    return nats
            answered = enumerate(zip(prompts, drawn, strict=True))
            prompts = [(*ids, *response.tokens, *ids[: 1 + row % 3]) for row, (ids, response) in answered]
        return 0.0

    @contextlib.contextmanager
    def plain_generation(self) -> Iterator[None]:
        """Disable dropout and the model's own generation settings, such as a repetition penalty, inside the block."""
        from transformers import GenerationConfig

        shipped = self.model.generation_config
        self.model.generation_config = GenerationConfig()
        try:
            with evaluation_mode(self.model):
                yield
        finally:
            self.model.generation_config = shipped

    def _decode(self, rows: Sequence[Ids], uniforms: Tensor, draws: Draws, **kept: Any) -> Decoded:
        """Call `decode` with the sampler's settings."""
        fuses = self.way in ("graph", "fused") and can_fuse(self.model)  # an adapter may have been added since
        return decode(
            self.model,
            rows,
            uniforms,
            end_ids=self.end_ids,
            pad_id=int(self.tokenizer.pad_token_id),
            temperature=draws.temperature,
            truncation=draws.truncation,
            fuses=fuses,
            graphs=fuses and self.way == "graph",
            **kept,
        )

    def _generate(self, rows: Sequence[Ids], uniforms: Tensor, draws: Draws) -> Decoded:
        """Decode with transformers' `generate` and left padding. All rows run until the longest one ends."""
        from transformers import GenerationConfig, LogitsProcessorList

        device, pad_id = self.model.device, int(self.tokenizer.pad_token_id)
        size = max(map(len, rows))
        input_ids = torch.tensor([[pad_id] * (size - len(ids)) + list(ids) for ids in rows])
        attention_mask = torch.tensor([[0] * (size - len(ids)) + [1] * len(ids) for ids in rows])
        processor = OwnDraws(uniforms.to(device), draws.temperature, draws.truncation)
        sequences = self.model.generate(
            input_ids=input_ids.to(device),
            attention_mask=attention_mask.to(device),
            generation_config=GenerationConfig(
                do_sample=False,  # the logits processor draws the tokens
                max_new_tokens=uniforms.shape[1],
                pad_token_id=pad_id,
                eos_token_id=sorted(self.end_ids) or None,
            ),
            logits_processor=LogitsProcessorList([processor]),
        )
        return Decoded(sequences[:, size:], processor.log_probs(), kept=processor.kept())

    def _pass_whole_rows(self, rows: Sequence[Ids], uniforms: Tensor, draws: Draws) -> Decoded:
        """Decode rows of equal length without a cache. All rows run until the longest one ends."""
        ids, ends = torch.tensor(rows, device=self.model.device), torch.tensor(sorted(self.end_ids), device=self.model.device)
        size, processor = ids.shape[1], OwnDraws(uniforms.to(ids.device), draws.temperature, draws.truncation)
        has_ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        while ids.shape[1] < size + uniforms.shape[1] and not has_ended.all():
            tokens = processor(ids, self.model(input_ids=ids, use_cache=False).logits[:, -1]).argmax(dim=-1, keepdim=True)
            ids, has_ended = torch.cat([ids, tokens], dim=1), has_ended | (tokens == ends).any(dim=1)
        return Decoded(ids[:, size:], processor.log_probs(), kept=processor.kept())


def _drawn(decoded: Decoded) -> list[Drawn]:
    """Convert decoded tokens to one `Drawn` per response."""
    tokens, log_probs = decoded.tokens.tolist(), decoded.log_probs.tolist()
    kept: Sequence[KeptSets | None] = decoded.kept or [None] * len(tokens)
    return [Drawn(*fields) for fields in zip(tokens, log_probs, kept, strict=True)]


def _uneven_prompts(row: Ids) -> tuple[list[Ids], int]:
    """Cut prompts from a row, and return them with a number of tokens to draw that keeps two turns within the row's length.

    Responses begin before every power of two, where windows and chunks usually end, and continue after it.
    """
    number = max(1, min(NUM_DRAWN, len(row) // 6))
    longest = max(3, len(row) - 2 * number - 3)
    lengths = [length for power in range(20) if 3 < (length := 2**power - number // 2) < longest]
    lengths = [3, 3, *lengths[: max(1, 2**28 // longest**2)], longest]  # the mask of a pass takes rows x longest^2 bytes
    return [(row[shift:] + row[:shift])[:length] for shift, length in enumerate(lengths)], number
