"""Grades responses in a worker process, which is killed and replaced if an answer makes it hang or crash."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, SupportsFloat

from rlzoo.core.errors import shown
from rlzoo.support.workers import Worker

MEMORY = 768 * 2**20
"""Memory limit in bytes for a worker process that handles answers or templates. The libraries take 0.14 GB. An answer that
needs more than the remainder, such as 9^{9^{9}}, counts as wrong."""

LARGEST_REWARD = 1e6
"""Largest magnitude of a reward. Sums and variances of larger rewards overflow, which makes metrics infinite or NaN."""


NAME = re.compile(r"[\w-]{1,64}")
"""Pattern for the name of a reward."""

Grade = float | Mapping[str, float]
"""A reward, or named rewards whose weighted sum is the reward."""


class Grader(Worker):
    """A worker process that grades responses. See `Worker`."""

    def __init__(
        self, function: Callable[..., Grade], start: Callable[[], object], timeout: float, memory: int | None = None
    ) -> None:
        """Store the arguments. The first call starts the worker.

        Args:
            function: returns the reward for one call. It must be importable by name, because it runs in another process.
            start: called once in each new worker, outside the time limit.
            timeout: time limit in seconds for one response, measured with the monotonic clock.
            memory: memory limit of the process in bytes; None for no limit.
        """
        super().__init__(partial(_plain, function), start, memory)
        self.timeout = timeout

    def grade(self, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return the function's value, which is a `Grade`, for each call, or None for a call that hung or crashed.

        Raises:
            UserError: no worker can be started.
        """
        answers = [self.call(call, self.timeout)[0] for call in calls]
        return [answer[0] if answer else None for answer in answers]


def _plain(function: Callable[..., Grade], *arguments: Any) -> Grade:
    """Return the function's value as a plain number or as plain numbers by name. This function runs in the worker."""
    return checked_grade(function(*arguments))


def checked_grade(value: object) -> Grade:
    """Convert a reward to a float, or a mapping from names to rewards to a dictionary of floats.

    Raises:
        ValueError: a name or a reward is invalid; see `checked_reward`.
    """
    if not isinstance(value, Mapping):
        return checked_reward(value)
    if not value or not all(isinstance(name, str) and NAME.fullmatch(name) for name in value):
        raise ValueError(f"the reward is {shown(value)}; a mapping needs names of 1 to 64 letters, digits, _ and -")
    return {name: checked_reward(part, f"the reward {name!r}") for name, part in value.items()}


def checked_reward(value: object, what: str = "the reward") -> float:
    """Convert a reward to a float. ``what`` names the reward in an error message.

    Raises:
        ValueError: the reward is not a finite number, or its magnitude exceeds `LARGEST_REWARD`.
    """
    number = math.nan
    if isinstance(value, SupportsFloat):  # numbers and one-element arrays and tensors, but not strings
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{what} is {shown(value)}, not a finite number")
    if abs(number) > LARGEST_REWARD:
        raise ValueError(f"{what} is {shown(value)}, outside the allowed range of -{LARGEST_REWARD:g} to {LARGEST_REWARD:g}")
    return number
