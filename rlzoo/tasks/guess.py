"""A multi-turn game that a tiny model learns in minutes: guessing a hidden number."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial

from pydantic import Field

from rlzoo.tasks.environments import Environment
from rlzoo.tasks.environments.guess import Guess
from rlzoo.tasks.episodes import EpisodeTask
from rlzoo.tasks.problem import Problem
from rlzoo.tasks.task import Drawn

FEWEST = 5
"""Minimum number of candidates in a game."""


class GuessTask(Drawn, EpisodeTask):
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

    def _draw(self, key: str) -> str:
        generator = random.Random(key)
        size = round(math.exp(generator.uniform(math.log(FEWEST), math.log(self.highest))))
        return f"guess 0-{size + 1}: {generator.randint(1, size)}"

    def _problem(self, question: str) -> Problem:
        text, space, number = question.rpartition(" ")
        return Problem(text + space, number)
