"""Asks whether the model's tokenizer and template turn the questions of a run into the prompts that they should be."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlzoo.gate.architecture import model_file
from rlzoo.gate.plan import Prompts
from rlzoo.models.pretrained import eos_token_ids
from rlzoo.rollout.prompts import encode_prompt, encoded

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rlzoo.config.sections import ModelConfig, RolloutConfig
    from rlzoo.tasks import Task

logger = logging.getLogger("rlzoo")

_COUNTED = 16  # how many of the longest texts are tokenized to estimate the longest prompt
_BYTES_PER_TOKEN = 2  # assumed without a tokenizer; lower than for English (4) or LaTeX (3), so that lengths are overestimated
_TEMPLATE_TOKENS = 64  # allowance for a chat template's own tokens

GENERATED = 256
"""Number of problems whose prompts are checked before a run if the task generates an unlimited number of problems."""


def check_prompts(tokenizer: PreTrainedTokenizerBase, prompts: Iterable[str]) -> None:
    """Check that the tokenizer has tokens for all characters in the prompts; only prompts with new characters are encoded.

    Raises:
        UserError: a character has no token; the message names the prompt and the characters.
    """
    met: set[str] = set()
    for prompt in prompts:
        if not met.issuperset(prompt):
            encode_prompt(tokenizer, prompt, chat_template=False)
            met.update(prompt)


@dataclass(frozen=True)
class Asked:
    """The prompts of a run or an evaluation."""

    prompts: list[str]  # before the chat template
    tools: Sequence[Mapping[str, Any]] = ()  # which the template describes before the first message
    host: bool = False  # whether an environment answers, so that episodes have several turns

    @classmethod
    def of(cls, task: Task, *, needed: int, held_out: int) -> Asked:
        """Return the prompts of a run; if its task generates questions, those of the first `GENERATED`.

        Args:
            task: the run's task.
            needed: number of training problems in the whole run.
            held_out: number of problems to evaluate on.
        """
        size = task.origin(held_out=False).size
        problems = task.train_problems(0, min(needed, GENERATED if size is None else size))
        problems = [*problems, *(task.held_out_problems(held_out) if held_out else [])]
        return cls(task.prompts(problems), task.host.tools if task.host else (), task.host is not None)

    def estimate(self, model: ModelConfig) -> Prompts:
        """Return the length of the longest prompt, counted if the tokenizer is on this machine, without loading the model."""
        texts = sorted(self.prompts, key=len, reverse=True)[:_COUNTED]
        template = _TEMPLATE_TOKENS if model.chat_template else 0
        if template and self.tools:
            template += -(-len(json.dumps(self.tools).encode()) // _BYTES_PER_TOKEN)
        file = model_file(model.path, "tokenizer.json", download=False)
        if file is None:
            return Prompts(template + max(-(-len(text.encode()) // _BYTES_PER_TOKEN) for text in texts), counted=False)
        from tokenizers import Tokenizer

        encoder = Tokenizer.from_file(str(file))
        return Prompts(template + max(len(encoded(encoder.encode, text).ids) for text in texts), counted=True)


@dataclass(frozen=True)
class Tokens:
    """What the gate found out about the tokens of a run."""

    end_ids: frozenset[int]  # tokens that end a response
    longest: int  # the longest prompt, in tokens
    longest_row: int  # the longest row that the run may need: prompt, responses and observations, in tokens


def check_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, asked: Asked, *, named: ModelConfig, rollout: RolloutConfig
) -> Tokens:
    """Ask whether the prompts are what they should be, and count their tokens.

    Raises:
        UserError: a prompt cannot be used with the model.
    """
    check_prompts(tokenizer, asked.prompts)
    lengths = [len(encode_prompt(tokenizer, prompt, named.chat_template)) for prompt in asked.prompts]
    longest = max(lengths, default=0)
    return Tokens(eos_token_ids(model, tokenizer), longest, longest + rollout.max_new_tokens)


def question_counts(task: Task, wanted: int) -> list[tuple[int, str]]:
    """Return messages to log: how many questions a run has, and a warning if fewer than ``wanted`` are held out."""
    size, held_out = (task.origin(held_out=side).size for side in (False, True))
    held_out = len(task.held_out_problems(wanted)) if held_out is None else held_out
    counts = f"task {task.name}: {'endless' if size is None else f'{size:,}'} training questions, {held_out:,} held out"
    few = f"eval.num_problems={wanted} exceeds the number of held-out questions, {held_out:,}; add questions, or lower it"
    return [(logging.INFO, counts), *([(logging.WARNING, few)] if held_out < wanted else [])]
