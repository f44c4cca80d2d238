"""A multi-turn game, learnable by a tiny model in minutes, whose aim is to find a number from "higher" and "lower" hints."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from pydantic import Field

from rlzoo.tasks.environments import Environment
from rlzoo.tasks.episodes import EpisodeTask, Workers
from rlzoo.tasks.problem import Problem
from rlzoo.tasks.task import Drawn

_BOUNDS = re.compile(r"([0-9]+)-([0-9]+)")
_GUESS = re.compile(r"(?:[^:]*:)?([0-9]{1,18})")  # the model may write anything before the colon

Answer = tuple[str, float, bool, dict[str, Any]]

FEWEST = 5
"""Minimum number of candidates in a game."""


class GuessTask(Drawn, EpisodeTask):
    """Games of `Guess`, in which a problem consists of a range and a hidden number in this range.

    The number of candidates is drawn log-uniformly from 5 to ``highest``, so that games differ in length. One in eight
    (range, number) pairs, selected by a hash, is held out for evaluation.
    """

    highest: int = Field(default=999, ge=20, le=10**6, description="largest number that can be hidden")
    turns: int = Field(
        default=16, ge=1, le=1000, description="maximum number of guesses per game; rollout.max_turns should be at least this"
    )
    cost: float = Field(default=0.05, ge=0, le=1, description="penalty for each turn that does not find the number")
    workers: Workers = 0

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


class Guess:
    """The model guesses a number between two bounds, and the environment says whether the hidden number is higher or lower.

    A turn is either the guess alone or any text followed by a colon and the guess, as in ``37-100:64``. The reply to a turn
    without a guess is ``what?``. The turn that finds the number has reward 1, and every other turn has reward ``-cost``. An
    episode that finds the number in turn n therefore earns ``1 - cost * (n - 1)``, and an episode that never finds it earns
    ``-cost * turns``.

    Example:
        >>> game = Guess(turns=3, cost=0.05)
        >>> game.reset(Problem("guess 0-100: ", "37"), seed=0)
        'guess 0-100: '
        >>> game.step("50")[:3]
        (' lower ', -0.05, False)
        >>> game.step("0-50:37")[:3]
        (' found', 1.0, True)
    """

    def __init__(self, turns: int = 16, cost: float = 0.05) -> None:
        """Store the rules.

        Args:
            turns: maximum number of guesses in an episode.
            cost: penalty for each turn that does not find the number.
        """
        self.turns = turns
        self.cost = cost

    def reset(self, problem: Problem, seed: int) -> str:
        """Hide the problem's answer between the bounds in its question. The game is deterministic."""
        bounds = _BOUNDS.search(problem.question)
        assert bounds is not None, "a problem of this task"
        self.number, self.low, self.high = int(problem.answer), int(bounds[1]), int(bounds[2])
        self.played = self.wasted = 0
        return problem.question

    def step(self, message: str) -> Answer:
        """Compare the number that was guessed in a turn with the hidden number."""
        self.played += 1
        guess = read_guess(message)
        if guess == self.number:
            return self._answer(" found", 1.0, is_won=True)
        if guess is None or not self.low < guess < self.high:
            self.wasted += 1
        if guess is None:
            return self._answer(" what? ", -self.cost)
        if guess < self.number:
            self.low = max(self.low, guess)
            return self._answer(" higher ", -self.cost)
        self.high = min(self.high, guess)
        return self._answer(" lower ", -self.cost)

    def _answer(self, text: str, reward: float, *, is_won: bool = False) -> Answer:
        """Return a reply with the remaining bounds as the state and the game's statistics as metrics.

        ``wasted`` is the share of turns that could not find the number because they named no number between the bounds.
        """
        info = {
            "state": f"{self.low}-{self.high}",
            "found": float(is_won),
            "guesses": float(self.played),
            "wasted": self.wasted / self.played,
        }
        return text, reward, is_won or self.played >= self.turns, info


def read_guess(message: str) -> int | None:
    """Return the number that was guessed in a turn, or None if there is none.

    Example:
        >>> read_guess("37-100:64"), read_guess("64"), read_guess("37-100")
        (64, 64, None)
    """
    guess = _GUESS.fullmatch(message)
    return int(guess[1]) if guess else None
