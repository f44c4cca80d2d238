"""Grading in a worker process that is killed and replaced when an answer makes it hang or crash."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, SupportsFloat

from rlzoo.errors import UserError, shown
from rlzoo.support.workers import Worker, WorkerError, WorkerStartError

MEMORY = 768 * 2**20
"""Bytes of its own that a worker process for answers or templates may hold. The libraries take 0.14 GB; an answer that wants
more than the rest, as 9^{9^{9}} does, counts 0."""

LARGEST_REWARD = 1e6
"""Magnitude of a reward. Sums and variances of larger ones overflow, and metrics would not be numbers any more."""


class Grader(Worker):
    """A worker process that grades; see `Worker`."""

    def __init__(
        self, function: Callable[..., float], start: Callable[[], object], timeout: float, memory: int | None = None
    ) -> None:
        """Keep what to run; nothing starts yet.

        Args:
            function: grades one call's arguments; importable by name, for it runs in another process.
            start: run once in each new worker, outside the time limit.
            timeout: seconds for one answer, by the monotonic clock.
            memory: bytes that the process may hold; None for no limit.
        """
        super().__init__(partial(_number, function), start, memory)
        self.timeout = timeout
        self._arguments = function, start, timeout, memory

    def __reduce__(self) -> tuple[Any, ...]:
        return Grader, self._arguments

    def grade(self, calls: Sequence[tuple[Any, ...]]) -> list[float]:
        """The function's value for each call; 0.0 where it hung or crashed.

        Raises:
            UserError: no worker can be started.
        """
        return [self._grade(call) for call in calls]

    def _grade(self, call: tuple[Any, ...]) -> float:
        try:
            return float(self.call(call, self.timeout))
        except WorkerError:
            return 0.0
        except WorkerStartError as error:
            raise UserError(f"the grading worker does not start: {error}") from error


def _number(function: Callable[..., float], *arguments: Any) -> float:
    """In the worker: the function's value as a plain number."""
    return checked_reward(function(*arguments))


def checked_reward(value: object) -> float:
    """A reward as a float.

    Raises:
        ValueError: it is not a finite number, or its magnitude is above `LARGEST_REWARD`.
    """
    number = math.nan
    if isinstance(value, SupportsFloat):  # numbers, and one-element arrays and tensors; not strings
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"returned {shown(value)}, not a finite number")
    if abs(number) > LARGEST_REWARD:
        raise ValueError(f"returned {shown(value)}, outside the allowed range of -{LARGEST_REWARD:g} to {LARGEST_REWARD:g}")
    return number
