"""A multi-turn game that a tiny model learns in minutes: guessing a hidden number."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial

from pydantic import Field

from rlzoo.environments import Environment
from rlzoo.environments.guess import Guess
from rlzoo.tasks.episodes import EpisodeTask
from rlzoo.tasks.task import draw_held_out, draw_trained, is_held_out
from rlzoo.types import Problem

FEWEST = 5
"""Minimum number of candidates in a game."""


class GuessTask(EpisodeTask):
    """Games of `Guess`: a problem consists of a range and a hidden number in this range.

    The number of candidates is drawn log-uniformly from 5 to ``highest``, so that games differ in length. One in eight
    (range, number) pairs, selected by a hash, is held out for evaluation.
    """

    highest: int = Field(default=999, ge=20, le=10**6, description="largest number that can be hidden")
    turns: int = Field(
        default=16, ge=1, le=1000, description="maximum number of guesses per game; rollout.max_turns should be at least this"
    )
    cost: float = Field(default=0.05, ge=0, le=1, description="penalty for each turn that does not find the number")
    workers: int = Field(
        default=0,
        ge=0,
        le=256,
        description="number of processes for environments; 0 runs them in the training process, with no time or memory limits",
    )

    @property
    def make(self) -> Callable[[], Environment]:
        """See `EpisodeTask.make`."""
        return partial(Guess, self.turns, self.cost)

    def train_problems(self, start: int, count: int) -> list[Problem]:
        """Return ``count`` training games, starting at index ``start``."""
        return [self._train_problem(index) for index in range(start, start + count)]

    def held_out_problems(self, count: int) -> list[Problem]:
        """Return the first ``count`` distinct held-out games, or fewer if the ranges allow no more."""
        return draw_held_out(self._draw, _is_held_out, count)

    def _train_problem(self, index: int) -> Problem:
        return draw_trained(self._draw, _is_held_out, f"{self.seed}:{index}")

    def _draw(self, key: str) -> Problem:
        generator = random.Random(key)
        size = round(math.exp(generator.uniform(math.log(FEWEST), math.log(self.highest))))
        return Problem(f"guess 0-{size + 1}: ", str(generator.randint(1, size)))


def _is_held_out(problem: Problem) -> bool:
    return is_held_out(problem.question + problem.answer)
