"""Gives each episode in a process its own random numbers from Python's global generator."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager


class OwnRandom:
    """A state of Python's global random generator that belongs to one episode.

    Libraries that draw from the global generator then depend only on the seed and the moves of the episode, regardless of what
    else the process runs between turns.

    Example:
        >>> first, second = OwnRandom(7), OwnRandom(7)
        >>> with first():
        ...     drawn = random.random()
        >>> with second():
        ...     random.random() == drawn
        True
    """

    def __init__(self, seed: int) -> None:
        self._state = random.Random(seed).getstate()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Use this state inside the block, and restore the generator's previous state afterwards."""
        before = random.getstate()
        random.setstate(self._state)
        try:
            yield
        finally:
            self._state = random.getstate()
            random.setstate(before)
