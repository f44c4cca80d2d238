"""What samples responses: what all samplers share, and the one that uses a transformers model."""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlzoo.acceleration import can_fuse
from rlzoo.rollout.decode import Caches, Decoded, Way, decode, quickest_way
from rlzoo.rollout.prompts import encode_prompt
from rlzoo.support.draws import OwnDraws, row_uniforms
from rlzoo.types import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Ids = tuple[int, ...]
Drawn = tuple[Sequence[int], Sequence[float]]
"""The tokens of one response and their log-probs; what follows the first end token is cut off later."""


@dataclass(frozen=True, slots=True)
class Draws:
    """How tokens are drawn: the same draws and weights give the same tokens.

    Example:
        ``Draws(seed=7, rows=range(4), limit=64)``
    """

    seed: int
    rows: Sequence[int]  # numbers of the rows in the whole batch; each draws random numbers of its own
    limit: int  # tokens of a turn, at most
    temperature: float = 1.0  # logits are divided by it
    turn: int = 0  # from 0; each turn draws numbers of its own


class Sampler(ABC):
    """Draws responses to prompts from the weights it was last given."""

    needs_weights = False
    """Whether it has weights of its own, which `update_weights` replaces; else it reads the trained model."""

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
        """Keep the settings.

        Args:
            model: the trained model.
            tokenizer: its tokenizer.
            end_ids: tokens that end a response.
            max_new_tokens: of a response, at most.
            batch_size: responses that are sampled at once, at most.
            chat_template: whether prompts are wrapped in the tokenizer's chat template.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.end_ids = end_ids
        self.max_new_tokens = max_new_tokens
        self.batch_size = batch_size
        self.chat_template = chat_template

    @property
    def context(self) -> int:
        """Tokens that the model can look at, prompt included."""
        return int(getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or 2**31)

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[str],
        samples: int,
        *,
        seed: int,
        temperature: float = 1.0,
        policy_version: int = 0,
        first_row: int = 0,
    ) -> list[Rollout]:
        """Draw ``samples`` responses to each prompt, those of one prompt next to each other.

        Args:
            prompts: texts, before the chat template.
            samples: responses per prompt.
            seed: the same seed and weights give the same responses; the global random state is left alone.
            temperature: logits are divided by it; no top-k, no top-p.
            policy_version: stamped on every rollout.
            first_row: responses of the same batch that come before these, elsewhere; every row draws its own numbers.
        """
        encoded = [encode_prompt(self.tokenizer, prompt, self.chat_template) for prompt in prompts]
        rows = [ids for ids in encoded for _ in range(samples)]
        draws = Draws(seed, range(first_row, first_row + len(rows)), self.max_new_tokens, temperature)
        drawn = self.draw(rows, draws)
        return [self._rollout(ids, *each, policy_version) for ids, each in zip(rows, drawn, strict=True)]

    def _rollout(self, prompt_ids: Ids, drawn: Sequence[int], log_probs: Sequence[float], policy_version: int) -> Rollout:
        """Cut after the first end token; that belongs to the response, also a padding token."""
        response_ids, finished = self.ended(drawn)
        return Rollout(
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            rollout_log_probs=tuple(log_probs[: len(response_ids)]),
            text=self.text(response_ids),
            finished=finished,
            policy_version=policy_version,
        )

    def ended(self, drawn: Sequence[int]) -> tuple[Ids, bool]:
        """The tokens up to the first end token, with it, and whether there is one."""
        end = next((place + 1 for place, token in enumerate(drawn) if token in self.end_ids), None)
        return tuple(drawn[:end]), end is not None

    def text(self, ids: Sequence[int]) -> str:
        """The text of some tokens, without the special ones."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    @abstractmethod
    def draw(self, rows: Sequence[Ids], draws: Draws) -> Sequence[Drawn]:
        """Draw tokens behind each row's, up to an end token or the limit."""

    def conversation(self) -> Conversation:
        """Draw the turns of episodes, with what can be kept from turn to turn."""
        return Conversation(self)

    @abstractmethod
    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the weights; names and shapes are those of the model's ``state_dict``."""

    @abstractmethod
    def close(self) -> None:
        """Give back what it holds outside this process's memory."""


class Conversation:
    """Draws the turns of episodes that advance together. This one gives the sampler the whole of each episode in every turn.

    It is right for every sampler. vLLM finds what it has computed before in its prefix cache.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def draw(self, contexts: Mapping[int, Ids], draws: Draws) -> list[Drawn]:
        """Draw a turn of each open episode.

        Args:
            contexts: all tokens of each open episode so far, by its place in the batch; those of a turn before, if there was
                one, and more.
            draws: of these episodes, in the same order.
        """
        return list(self.sampler.draw(list(contexts.values()), draws))

    def close(self) -> None:
        """Give back what is held between turns."""


class HFSampler(Sampler):
    """Samples with a transformers model, by `decode` or by transformers' own `generate`; the end token is kept."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        own_weights: bool = False,
        way: Way | None = None,
        **common: Any,
    ) -> None:
        """See `Sampler`; ``own_weights``: whether it samples from a copy of the model, ``way``: None for the quickest."""
        super().__init__(copy.deepcopy(model).requires_grad_(False) if own_weights else model, tokenizer, **common)
        self.needs_weights = own_weights
        self.way: Way = way or quickest_way(self.model)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the weights into the sampler's own model."""
        assert self.needs_weights, "it reads the trained model"
        own = self.model.state_dict()
        with torch.no_grad():
            for name, tensor in weights:
                own[name].copy_(tensor)

    def close(self) -> None:
        """Nothing to give back."""

    def draw(self, rows: Sequence[Ids], draws: Draws) -> list[Drawn]:
        """See `Sampler.draw`."""
        drawn: list[Drawn] = []
        with self.plain_generation():
            for start in range(0, len(rows), self.batch_size):
                piece = slice(start, start + self.batch_size)
                uniforms = row_uniforms(draws.seed, draws.rows[piece], draws.limit, draws.turn)
                decoded = self._decoded(rows[piece], uniforms, draws.temperature)
                drawn += zip(decoded.tokens.tolist(), decoded.log_probs.tolist(), strict=True)
        return drawn

    def conversation(self) -> Conversation:
        """See `Sampler.conversation`; where rows are decoded one by one, their caches are kept from turn to turn."""
        return Conversation(self) if self.way == "generate" else CachedConversation(self)

    @contextlib.contextmanager
    def plain_generation(self) -> Iterator[None]:
        """Within it, nothing the model ships with changes its logits, such as a penalty on repetition, and dropout is off."""
        from transformers import GenerationConfig

        shipped, was_training = self.model.generation_config, self.model.training
        self.model.generation_config = GenerationConfig()
        self.model.eval()
        try:
            yield
        finally:
            self.model.generation_config = shipped
            self.model.train(was_training)

    def _decoded(self, rows: Sequence[Ids], uniforms: Tensor, temperature: float) -> Decoded:
        pad_id = int(self.tokenizer.pad_token_id)
        if self.way == "generate":
            return self._generate(rows, uniforms, temperature, pad_id)
        return decode(
            self.model,
            rows,
            uniforms,
            end_ids=self.end_ids,
            pad_id=pad_id,
            temperature=temperature,
            fuses=self.way == "fused" and can_fuse(self.model),  # it may have been given an adapter
        )

    def _generate(self, rows: Sequence[Ids], uniforms: Tensor, temperature: float, pad_id: int) -> Decoded:
        """The plain path: transformers' `generate`, left padding, every row until the longest ends."""
        from transformers import GenerationConfig, LogitsProcessorList

        device = self.model.device
        size = max(map(len, rows))
        input_ids = torch.tensor([[pad_id] * (size - len(ids)) + list(ids) for ids in rows])
        attention_mask = torch.tensor([[0] * (size - len(ids)) + [1] * len(ids) for ids in rows])
        draws = OwnDraws(uniforms.to(device), temperature)
        sequences = self.model.generate(
            input_ids=input_ids.to(device),
            attention_mask=attention_mask.to(device),
            generation_config=GenerationConfig(
                do_sample=False,  # the draws have been made
                max_new_tokens=uniforms.shape[1],
                pad_token_id=pad_id,
                eos_token_id=sorted(self.end_ids),
            ),
            logits_processor=LogitsProcessorList([draws]),
        )
        return Decoded(sequences[:, size:], draws.log_probs())


class CachedConversation(Conversation):
    """Keeps the keys and values of an episode from turn to turn: each token is computed once."""

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
                fuses=sampler.way == "fused" and can_fuse(sampler.model),
                caches=self.caches,
                places=list(contexts),
            )
        self.caches = decoded.caches
        return list(zip(decoded.tokens.tolist(), decoded.log_probs.tolist(), strict=True))
