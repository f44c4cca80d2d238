"""A game of several turns that a tiny model learns in minutes: find a hidden number by guessing."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial

from pydantic import Field

from rlzoo.environments import Environment
from rlzoo.environments.guess import Guess
from rlzoo.tasks.episodes import EpisodeTask
from rlzoo.tasks.task import is_held_out
from rlzoo.types import Problem

FEWEST = 5
"""Numbers to guess from, at least."""


class GuessTask(EpisodeTask):
    """Games of `Guess`: the problem is a range and the number hidden in it.

    How many numbers there are to guess from is drawn log-uniformly from 5 to ``highest``, so that games differ in length. One
    in eight pairs of a range and a number is kept for evaluation, decided by the pair.
    """

    highest: int = Field(default=999, ge=20, le=10**6, description="largest number that is hidden, in the widest range")
    turns: int = Field(default=16, ge=1, le=1000, description="guesses of a game; rollout.max_turns should not be below")
    cost: float = Field(default=0.05, ge=0, le=1, description="what each turn that does not find the number takes off")
    workers: int = Field(
        default=0, ge=0, le=256, description="processes for environments; 0: in the process that trains, without limits"
    )

    @property
    def make(self) -> Callable[[], Environment]:
        """See `EpisodeTask.make`."""
        return partial(Guess, self.turns, self.cost)

    def train_problems(self, start: int, count: int) -> list[Problem]:
        """Training games ``start`` to ``start + count``."""
        return [self._train_problem(index) for index in range(start, start + count)]

    def held_out_problems(self, count: int) -> list[Problem]:
        """The first ``count`` distinct held-out games, fewer if the ranges allow no more."""
        found: dict[Problem, None] = {}
        draw = tries = 0
        while len(found) < count and tries < 2000:
            problem = self._draw(f"held-out:{draw}")
            draw, tries = draw + 1, tries + 1
            if _is_held_out(problem) and problem not in found:
                found[problem] = None
                tries = 0
        return list(found)

    def _train_problem(self, index: int) -> Problem:
        attempt = 0
        while _is_held_out(problem := self._draw(f"train:{self.seed}:{index}:{attempt}")):
            attempt += 1
        return problem

    def _draw(self, key: str) -> Problem:
        generator = random.Random(key)
        size = round(math.exp(generator.uniform(math.log(FEWEST), math.log(self.highest))))
        return Problem(f"guess 0-{size + 1}: ", str(generator.randint(1, size)))


def _is_held_out(problem: Problem) -> bool:
    return is_held_out(problem.question + problem.answer)
