"""How long a task's prompts are, in tokens: counted where the tokenizer is on this machine, else reckoned from the text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlzoo.config.run_config import RunConfig
from rlzoo.rollout.prompts import encoded

LOOKED_AT = 2000
"""Training prompts looked at, at most: a plan must be quick."""

_COUNTED = 16  # of them, the longest texts: the longest prompt is among these, unless texts tokenize very unlike
_BYTES_PER_TOKEN = 2  # without a tokenizer: fewer than English (4) and LaTeX (3) have, so that the length is rather too large
_TEMPLATE_TOKENS = 64  # room for a chat template's own tokens


@dataclass(frozen=True, slots=True)
class Prompts:
    """The longest of a task's prompts.

    Example:
        ``Prompts(longest=256, counted=True)``
    """

    longest: int  # tokens
    counted: bool  # by the model's tokenizer; False: reckoned from the length of the text


def longest_prompt(config: RunConfig, tokenizer: Path | None) -> Prompts:
    """The longest prompt that the run will meet, of the first `LOOKED_AT` and those of the evaluation.

    Args:
        config: the run.
        tokenizer: the model's ``tokenizer.json``; None if it is not on this machine.
    """
    task = config.task
    problems = task.train_problems(0, min(LOOKED_AT, config.steps * config.rollout.num_prompts))
    if config.eval.num_problems:
        problems = problems + task.held_out_problems(config.eval.num_problems)
    texts = sorted((task.prompt(problem) for problem in problems), key=len, reverse=True)[:_COUNTED]
    template = _TEMPLATE_TOKENS if config.model.chat_template else 0
    if tokenizer is None:
        return Prompts(template + max(-(-len(text.encode()) // _BYTES_PER_TOKEN) for text in texts), counted=False)
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(str(tokenizer))
    return Prompts(template + max(len(encoded(encoder.encode, text).ids) for text in texts), counted=True)
