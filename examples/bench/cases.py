"""The benchmark cases: models, prompts, response lengths and update counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from examples.bench import models
from rlzoo.tasks import Task, build_task

GROUP = 8
STORIES = "Write a long story about a {} who has lost the way home."
HEROES = ("fox", "miller", "queen", "robot", "sailor", "giant", "clockmaker", "goose")


@dataclass(frozen=True)
class Case:
    """One comparison.

    Example:
        ``CASES["embedded"].prompt(3)`` is the fourth prompt in both libraries.
    """

    name: str
    about: str
    model: Callable[[Path], Path]
    prompt: Callable[[int], str]
    num_prompts: int
    max_new_tokens: int
    updates: int  # number of optimizer steps per rollout batch
    pairs: int = 5
    autocast: Literal["none", "bfloat16"] = "none"
    rows: int | None = None  # number of rows per micro-batch in TRL; None for a whole update
    settings: tuple[str, ...] = ()  # settings of rlzoo that differ from its defaults

    @property
    def completions(self) -> int:
        """The number of responses in a step."""
        return self.num_prompts * GROUP


def embedded(folder: Path) -> Path:
    """Create the model that ships with rlzoo."""
    import rlzoo

    return Path(rlzoo.__file__).parent / "models" / "assets" / "embedded"


def embedded_endless(folder: Path) -> Path:
    """Create the model that ships with rlzoo, without an end token."""
    return models.endless("embedded", folder / "embedded-endless")


def countdown(folder: Path) -> Path:
    """Create the 5-million-parameter model that counts down."""
    return models.countdown(folder / "countdown")


def smollm2(folder: Path) -> Path:
    """Create SmolLM2-135M-Instruct without an end token."""
    return models.endless("smollm2", folder / "smollm2-endless")


@cache
def sums() -> Task:
    """Create the default task."""
    return build_task({"name": "arithmetic", "seed": 0})


def addition(index: int) -> str:
    """Return a sum from the default task."""
    return sums().prompt(sums().train_problems(index, 1)[0])


def qwen3(folder: Path) -> Path:
    """Create a Qwen3 model with the shape of Qwen3-1.7B, random weights and no end token."""
    return models.random_qwen3("qwen3-1.7b", folder / "qwen3-1.7b-shape")


def small_qwen3(folder: Path) -> Path:
    """Create the same kind of model with the shape of Qwen3-0.6B. An 80 GB GPU can hold two of them during training."""
    return models.random_qwen3("qwen3-0.6b", folder / "qwen3-0.6b-shape")


def tiny_qwen3(folder: Path) -> Path:
    """Create a Qwen3 model with two narrow layers, random weights and no end token."""
    return models.random_qwen3("tiny", folder / "tiny-qwen3-shape")


def counts(start: int, every: int = 0, long: int = 0) -> Callable[[int], str]:
    """Return a function that creates 12-token prompts. One response in ``every`` has ``long`` tokens, the others ``start``."""

    def prompt(index: int) -> str:
        number = long if every and index % every == 0 else start
        return " ".join([*(f"d{7 * place + index % 50}" for place in range(11)), f"c{number}"])

    return prompt


def words(number: int) -> Callable[[int], str]:
    """Return a function that creates prompts of ``number`` words from the random models' vocabulary."""
    return lambda index: " ".join(f"t{2 + (7 * place + index) % 200}" for place in range(number))


def story(index: int) -> str:
    """Return a prompt in English."""
    return STORIES.format(HEROES[index % len(HEROES)])


CASES = {
    case.name: case
    for case in (
        Case("embedded", "0.1 M parameters, 64 x 128 tokens", embedded_endless, addition, 8, 128, 4, pairs=15),
        Case("embedded-natural", "0.1 M parameters, 64 responses of natural lengths", embedded, addition, 8, 128, 4, pairs=15),
        Case("long-tail", "5 M parameters, 72 responses of 32 tokens, 8 of 256", countdown, counts(32, 10, 256), 10, 256, 4),
        Case("equal", "5 M parameters, 64 x 128 tokens", countdown, counts(1000), 8, 128, 1),
        Case("equal-off-policy", "the same", countdown, counts(1000), 8, 128, 4),
        Case("smollm2", "SmolLM2-135M, 32 x 128 tokens, float32", smollm2, story, 4, 128, 1),
        Case("smollm2-bfloat16", "the same, bfloat16 autocast", smollm2, story, 4, 128, 1, autocast="bfloat16"),
    )
}
QUICK = ("embedded", "long-tail")
ON_GPU = {
    case.name: case
    for case in (
        Case("gpu-smollm2", "SmolLM2-135M, 64 x 128 tokens, bfloat16 autocast", smollm2, story, 8, 128, 1, 3, "bfloat16"),
        Case("gpu-qwen3", "shape of Qwen3-1.7B, 64 x 1,024 tokens, bfloat16 autocast", qwen3, words(64), 8, 1024, 1, 2,
             "bfloat16", rows=4, settings=("learner.max_tokens_per_micro_batch=4352",)),
        Case("gpu-trl", "shape of Qwen3-0.6B, 64 x 1,024 tokens, bfloat16 autocast", small_qwen3, words(64), 8, 1024, 1, 2,
             "bfloat16", rows=4, settings=("learner.max_tokens_per_micro_batch=4352",)),
        Case("small-smollm2", "SmolLM2-135M, 8 x 4 tokens, bfloat16 autocast", smollm2, story, 1, 4, 1, 1, "bfloat16"),
        Case("small-qwen3", "Qwen3 of two narrow layers, 16 x 32 tokens, bfloat16 autocast", tiny_qwen3, words(12), 2, 32, 1, 1,
             "bfloat16", rows=4, settings=("learner.max_tokens_per_micro_batch=176",)),
        Case("small-trl", "the same", tiny_qwen3, words(12), 2, 32, 1, 1, "bfloat16", rows=4,
             settings=("learner.max_tokens_per_micro_batch=176",)),
    )
}  # fmt: skip
"""The cases of `examples.gpu`, and the same cases at a small scale."""


def find(name: str) -> Case:
    """Return the case with this name."""
    return {**CASES, **ON_GPU}[name]
