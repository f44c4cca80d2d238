"""The side of reasoning-gym that runs in a worker process: its datasets and their scorers, without torch."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

CHUNK = 500  # reasoning-gym's own size of a dataset; some datasets cannot be read past their size
_NONSENSE = "?"


def start() -> None:
    """Import reasoning-gym ahead of the first answer, so that no answer's time pays for it, and bound its memory."""
    import reasoning_gym

    from rlzoo.tasks.limits import limit_memory

    assert reasoning_gym
    limit_memory()


def score(name: str, options: str, answer: str, entry: dict[str, Any]) -> float:
    """1.0 for the reference answer itself and for what the dataset's own scorer pays in full, else 0.0.

    Args:
        name: of the dataset.
        options: its settings, as JSON.
        answer: the response's final answer.
        entry: the problem as the dataset made it, with what the scorer reads.
    """
    if entry["answer"] is not None and answer == str(entry["answer"]):
        return 1.0
    scorer = make_dataset(name, options, 0)
    paid_in_full = scorer.score_answer(answer, entry) == 1.0  # less is paid for a superset of the answer, or for trying
    # one scorer (game_of_life_halting, 0.1.25) pays in full for any text at all
    return float(paid_in_full and scorer.score_answer(_NONSENSE, entry) < 1.0)


@lru_cache(maxsize=64)
def make_dataset(name: str, options: str, seed: int) -> Any:
    """The reasoning-gym dataset of that name, options (as JSON) and seed, with ``CHUNK`` problems."""
    import reasoning_gym
    from reasoning_gym.composite import DatasetSpec

    settings = json.loads(options)
    if name == "composite":
        settings["datasets"] = [DatasetSpec(**spec) for spec in settings.get("datasets", [])]
    return reasoning_gym.create_dataset(name, seed=seed, size=CHUNK, **settings)
