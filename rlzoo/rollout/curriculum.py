"""Chooses training problems by their mean rewards, which are measured whenever the problems are sampled."""

from __future__ import annotations

from collections.abc import Sequence

from rlzoo.config.sections import RolloutConfig
from rlzoo.tasks.problem import Problem

Measured = dict[str, tuple[float, int]]
"""The mean reward of the last graded responses to each question, and the step that trained on these responses."""


def choose(problems: Sequence[Problem], measured: Measured, step: int, rollout: RolloutConfig) -> list[int]:
    """Return the indices of ``rollout.num_prompts`` different problems, first those in the band, then those nearest to it.

    A problem that was not measured in the last ``rollout.measure_every`` steps counts as being in the band.

    Example:
        >>> measured = {"easy": (1.0, 1), "hard": (0.125, 1), "impossible": (0.0, 1)}
        >>> problems = [Problem(name, "") for name in ("easy", "impossible", "hard", "new", "new")]
        >>> rollout = RolloutConfig(num_prompts=2, band=(0.2, 0.8), measure_every=50)
        >>> choose(problems, measured, 9, rollout), choose(problems, measured, 51, rollout)
        ([3, 2], [0, 1])
    """
    assert rollout.band is not None, "checked by the caller"
    low, high = rollout.band

    def distance(question: str) -> float:
        mean, when = measured.get(question, (low, step))
        return 0.0 if step - when >= rollout.measure_every else max(low - mean, mean - high, 0.0)

    places = {problem.question: place for place, problem in reversed(list(enumerate(problems)))}
    nearest = sorted(places, key=lambda question: (distance(question), places[question]))
    return [places[question] for question in nearest[: rollout.num_prompts]]
