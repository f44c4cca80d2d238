"""Samples responses with transformers' `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlzoo.types import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class LogProbRecorder:
    """A logits processor that keeps the log-probability of every sampled token, one step's logits at a time.

    It applies the temperature itself, so what it records is the distribution that was sampled from.
    """

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        self.columns: list[Tensor] = []
        self._last: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores ``(B, V)`` of the next token, given ``(B, S)`` ids; called by `generate` before each draw."""
        self._record(input_ids[:, -1])
        self._last = (scores.float() / self.temperature).log_softmax(dim=-1)
        return self._last

    def _record(self, token_ids: Tensor) -> None:
        if self._last is not None:
            self.columns.append(self._last.gather(-1, token_ids[:, None]))

    def finish(self, sequences: Tensor) -> Tensor:
        """Log-probabilities ``(B, T)`` of the T tokens drawn, given what `generate` returned."""
        self._record(sequences[:, -1])
        return torch.cat(self.columns, dim=1)


class Sampler:
    """Draws responses from the current weights: left padding, position ids from the mask, the end token kept.

    Example:
        ``Sampler(model, tokenizer, end_ids={2}, max_new_tokens=64).sample(["3+5="], 8, seed=1)`` gives eight rollouts.
    """

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
        self.model = model
        self.tokenizer = tokenizer
        self.end_ids = end_ids
        self.max_new_tokens = max_new_tokens
        self.batch_size = batch_size
        self.chat_template = chat_template

    def encode(self, prompt: str) -> tuple[int, ...]:
        """Token ids of a prompt, wrapped in the chat template if that is asked for."""
        if self.chat_template:
            messages = [{"role": "user", "content": prompt}]
            text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return tuple(self.tokenizer(prompt)["input_ids"])

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[str], samples: int, *, seed: int, temperature: float = 1.0, policy_version: int = 0
    ) -> list[Rollout]:
        """Draw ``samples`` responses to each prompt, those of one prompt next to each other.

        Args:
            prompts: texts, before the chat template.
            samples: responses per prompt.
            seed: the same seed and weights give the same responses; the global random state is left alone.
            temperature: logits are divided by it; no top-k, no top-p.
            policy_version: stamped on every rollout.
        """
        rows = [ids for ids in map(self.encode, prompts) for _ in range(samples)]
        was_training = self.model.training
        self.model.eval()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            rollouts = [
                rollout
                for start in range(0, len(rows), self.batch_size)
                for rollout in self._sample_rows(rows[start : start + self.batch_size], temperature, policy_version)
            ]
        self.model.train(was_training)
        return rollouts

    def _sample_rows(self, rows: Sequence[tuple[int, ...]], temperature: float, policy_version: int) -> list[Rollout]:
        from transformers import GenerationConfig, LogitsProcessorList

        pad_id = int(self.tokenizer.pad_token_id)
        size = max(map(len, rows))
        input_ids = torch.tensor([[pad_id] * (size - len(ids)) + list(ids) for ids in rows])
        attention_mask = torch.tensor([[0] * (size - len(ids)) + [1] * len(ids) for ids in rows])
        recorder = LogProbRecorder(temperature)
        sequences = self.model.generate(
            input_ids=input_ids.to(self.model.device),
            attention_mask=attention_mask.to(self.model.device),
            generation_config=GenerationConfig(
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=self.max_new_tokens,
                pad_token_id=pad_id,
                eos_token_id=sorted(self.end_ids),
            ),
            logits_processor=LogitsProcessorList([recorder]),
        )
        log_probs = recorder.finish(sequences).tolist()
        responses = sequences[:, size:].tolist()
        return [
            self._rollout(ids, response, reported, policy_version)
            for ids, response, reported in zip(rows, responses, log_probs, strict=True)
        ]

    def _rollout(self, prompt_ids: tuple[int, ...], drawn: list[int], log_probs: list[float], policy_version: int) -> Rollout:
        # the first end token belongs to the response, also where it is the padding token; what follows is padding
        end = next((place + 1 for place, token in enumerate(drawn) if token in self.end_ids), None)
        response_ids = tuple(drawn[:end])
        return Rollout(
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            rollout_log_probs=tuple(log_probs[: len(response_ids)]),
            text=self.tokenizer.decode(response_ids, skip_special_tokens=True),
            finished=end is not None,
            policy_version=policy_version,
        )
