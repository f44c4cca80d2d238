"""Gives each episode in a process its own random numbers from Python's global generator."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def own_random(generator: random.Random) -> Iterator[None]:
    """Draw from an episode's own generator wherever the block draws from Python's global generator.

    Libraries that draw from the global generator then depend only on the seed and the moves of the episode, and not on what
    else the process runs between turns.

    Example:
        >>> with own_random(random.Random(7)):
        ...     number = random.random()
        >>> number == random.Random(7).random()
        True
    """
    before = random.getstate()
    random.setstate(generator.getstate())
    try:
        yield
    finally:
        generator.setstate(random.getstate())
        random.setstate(before)
