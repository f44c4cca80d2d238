"""The base class of samplers, and the sampler for transformers models."""

from __future__ import annotations

import contextlib
import copy
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rlzoo.acceleration import can_fuse
from rlzoo.models.probe import evaluation_mode
from rlzoo.rollout.decode import Caches, Decoded, Way, decode, quickest_way
from rlzoo.rollout.prompts import encode_prompt
from rlzoo.support.draws import OwnDraws, Truncation, refuse_nan, row_uniforms
from rlzoo.types import KeptSets, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Ids = tuple[int, ...]


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
    """Settings for one draw; equal settings and weights give equal tokens."""

    seed: int
    rows: Sequence[int]  # row numbers in the whole batch; each row has its own random numbers
    limit: int  # maximum number of tokens in a turn
    temperature: float = 1.0  # divides the logits
    turn: int = 0  # counted from 0; each turn has its own random numbers
    truncation: Truncation | None = None  # None for the whole distribution


class Sampler(ABC):
    """Draws responses to prompts with the current weights."""

    needs_weights = False
    """Whether the sampler has its own weights, which `update_weights` replaces; otherwise it reads the trained model."""
    in_flight = False
    """Whether several threads may call `sample` at once, and `update_weights` may be called while they sample."""

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
        return int(getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or 2**31)

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
        """Draw ``samples`` responses to each prompt; responses to the same prompt are consecutive.

        Args:
            prompts: texts, before the chat template is applied.
            samples: responses per prompt.
            seed: equal seeds and weights give equal responses; the global random state does not change.
            temperature: sampling temperature.
            truncation: top-k and top-p; None samples from the whole distribution.
            policy_version: version number to record in every rollout.
            first_row: index of the first response in the batch of all processes; offsets the random numbers.
        """
        with self._tokenizing:
            encoded = [encode_prompt(self.tokenizer, prompt, self.chat_template) for prompt in prompts]
        rows = [ids for ids in encoded for _ in range(samples)]
        numbers = range(first_row, first_row + len(rows))
        draws = Draws(seed, numbers, self.max_new_tokens, temperature, truncation=truncation)
        drawn = self.draw(rows, draws)
        with self._tokenizing:
            return [self._rollout(ids, each, policy_version) for ids, each in zip(rows, drawn, strict=True)]

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
        """Return the tokens up to and including the first end token, and whether there is one; see also `refuse_nan`."""
        end = next((place + 1 for place, token in enumerate(drawn.tokens) if token in self.end_ids), None)
        refuse_nan(torch.tensor(drawn.log_probs[:end]))
        return tuple(drawn.tokens[:end]), end is not None

    def text(self, ids: Sequence[int]) -> str:
        """Decode tokens to text, without padding and the tokens that begin or end a text.

        Other special tokens stay, because rewards and tool calls depend on tokens such as ``<answer>`` and ``<tool_call>``.
        """
        return str(self.tokenizer.decode([token for token in ids if token not in self._unread], skip_special_tokens=False))

    @abstractmethod
    def draw(self, rows: Sequence[Ids], draws: Draws) -> Sequence[Drawn]:
        """Continue each row of tokens up to an end token or the limit."""

    def conversation(self) -> Conversation:
        """Return a conversation, which draws the turns of episodes and may cache values between turns."""
        return Conversation(self)

    @abstractmethod
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int = 0) -> None:
        """Replace the weights; names and shapes match the model's ``state_dict``.

        Args:
            weights: names and tensors.
            version: version of the weights, in optimizer steps.
        """

    @abstractmethod
    def close(self) -> None:
        """Release resources outside this process's memory."""


class Conversation:
    """Draws the turns of episodes that advance together.

    This class works with every sampler, because it passes the whole episode to the sampler in every turn. vLLM reuses earlier
    computation through its prefix cache.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def draw(self, contexts: Mapping[int, Ids], draws: Draws) -> list[Drawn]:
        """Draw a turn for each open episode.

        Args:
            contexts: all tokens so far of each open episode, keyed by its index in the batch. They begin with the tokens that
                were passed for the previous turn.
            draws: settings for these episodes, in the same order.
        """
        return list(self.sampler.draw(list(contexts.values()), draws))

    def close(self) -> None:
        """Release resources that are held between turns."""


class HFSampler(Sampler):
    """Samples with a transformers model, using `decode` or transformers' `generate`; responses include the end token."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        own_weights: bool = False,
        way: Way | None = None,
        device: torch.device | None = None,
        **common: Any,
    ) -> None:
        """See `Sampler`. ``own_weights`` samples from a copy of the model on ``device``; ``way=None`` is the fastest method."""
        own = copy.deepcopy(model).requires_grad_(False).to(device or model.device) if own_weights else model
        super().__init__(own, tokenizer, **common)
        self.needs_weights = own_weights
        self.way: Way = way or quickest_way(self.model)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int = 0) -> None:
        """Copy the weights into the sampler's own model."""
        assert self.needs_weights, "this sampler reads the trained model"
        own = self.model.state_dict()
        with torch.no_grad():
            for name, tensor in weights:
                own[name].copy_(tensor)

    def close(self) -> None:
        """Do nothing, because there is nothing to release."""

    def draw(self, rows: Sequence[Ids], draws: Draws) -> list[Drawn]:
        """See `Sampler.draw`."""
        drawn: list[Drawn] = []
        with self.plain_generation():
            for start in range(0, len(rows), self.batch_size):
                piece = slice(start, start + self.batch_size)
                uniforms = row_uniforms(draws.seed, draws.rows[piece], draws.limit, draws.turn)
                drawn += _drawn(self._decoded(rows[piece], uniforms, draws))
        return drawn

    def conversation(self) -> Conversation:
        """See `Sampler.conversation`; unless ``way`` is "generate", the caches are kept between turns."""
        return Conversation(self) if self.way == "generate" else CachedConversation(self)

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

    def _decoded(self, rows: Sequence[Ids], uniforms: Tensor, draws: Draws) -> Decoded:
        pad_id = int(self.tokenizer.pad_token_id)
        if self.way == "generate":
            return self._generate(rows, uniforms, draws, pad_id)
        return decode(
            self.model,
            rows,
            uniforms,
            end_ids=self.end_ids,
            pad_id=pad_id,
            temperature=draws.temperature,
            truncation=draws.truncation,
            fuses=self.way == "fused" and can_fuse(self.model),  # an adapter may have been added since
        )

    def _generate(self, rows: Sequence[Ids], uniforms: Tensor, draws: Draws, pad_id: int) -> Decoded:
        """Decode with transformers' `generate` and left padding; all rows run until the longest one ends."""
        from transformers import GenerationConfig, LogitsProcessorList

        device = self.model.device
        size = max(map(len, rows))
        input_ids = torch.tensor([[pad_id] * (size - len(ids)) + list(ids) for ids in rows])
        attention_mask = torch.tensor([[0] * (size - len(ids)) + [1] * len(ids) for ids in rows])
        own = OwnDraws(uniforms.to(device), draws.temperature, draws.truncation)
        sequences = self.model.generate(
            input_ids=input_ids.to(device),
            attention_mask=attention_mask.to(device),
            generation_config=GenerationConfig(
                do_sample=False,  # the logits processor draws the tokens
                max_new_tokens=uniforms.shape[1],
                pad_token_id=pad_id,
                eos_token_id=sorted(self.end_ids),
            ),
            logits_processor=LogitsProcessorList([own]),
        )
        return Decoded(sequences[:, size:], own.log_probs(), kept=own.kept())


class CachedConversation(Conversation):
    """Keeps the keys and values of episodes between turns, so that each token is computed once."""

    def __init__(self, sampler: HFSampler) -> None:
        super().__init__(sampler)
        self.sampler: HFSampler = sampler
        self.caches: Caches | None = None

    def draw(self, contexts: Mapping[int, Ids], draws: Draws) -> list[Drawn]:
        """See `Conversation.draw`."""
        sampler = self.sampler
        uniforms = row_uniforms(draws.seed, draws.rows, draws.limit, draws.turn)
        with sampler.plain_generation():
            decoded = decode(
                sampler.model,
                list(contexts.values()),
                uniforms,
                end_ids=sampler.end_ids,
                pad_id=int(sampler.tokenizer.pad_token_id),
                temperature=draws.temperature,
                truncation=draws.truncation,
                fuses=sampler.way == "fused" and can_fuse(sampler.model),
                caches=self.caches,
                places=list(contexts),
            )
        self.caches = decoded.caches
        return _drawn(decoded)


def _drawn(decoded: Decoded) -> list[Drawn]:
    """Convert decoded tokens to one `Drawn` per response."""
    pairs = zip(decoded.tokens.tolist(), decoded.log_probs.tolist(), strict=True)
    if decoded.kept is None:
        return [Drawn(*pair) for pair in pairs]
    kept = (KeptSets(sets.ids.numpy().tobytes(), sets.sizes.int().numpy().tobytes()) for sets in decoded.kept)
    return [Drawn(*pair, sets) for pair, sets in zip(pairs, kept, strict=True)]
