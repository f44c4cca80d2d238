"""Grading in a worker process that is killed and replaced when an answer makes it hang or crash."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, SupportsFloat, cast

from rlzoo.errors import UserError, shown
from rlzoo.support.workers import Worker, WorkerError, WorkerStartError, WorkerTimeoutError

LARGEST_REWARD = 1e6
"""Magnitude of a reward. Sums and variances of larger ones overflow, and metrics would not be numbers any more."""


class Grader:
    """One worker process, started when first needed and reused; safe to call from any thread.

    Attributes:
        num_timeouts: answers that took longer than ``timeout`` and counted 0.
        num_crashes: answers that raised or ended the worker and counted 0.
        last_failure: what was the matter with the last of these.
    """

    def __init__(self, function: Callable[..., float], start: Callable[[], None], timeout: float) -> None:
        """Keep what to run; nothing starts yet.

        Args:
            function: grades one call's arguments; importable by name, for it runs in another process.
            start: run once in each new worker, outside the time limit.
            timeout: seconds for one answer, by the monotonic clock.
        """
        self.function, self.start, self.timeout = function, start, timeout
        self.num_timeouts = 0
        self.num_crashes = 0
        self.last_failure = ""
        self._lock = threading.Lock()
        self._worker: Worker | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Grader, (self.function, self.start, self.timeout)

    @property
    def pid(self) -> int | None:
        """The worker process, if there is one."""
        return None if self._worker is None else self._worker.pid

    def grade(self, calls: Sequence[tuple[Any, ...]]) -> list[float]:
        """The function's value for each call; 0.0 where it hung or crashed.

        Raises:
            UserError: no worker can be started.
        """
        return [self._grade(call) for call in calls]

    def close(self) -> None:
        """End the worker; the next ``grade`` starts another."""
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def _grade(self, call: tuple[Any, ...]) -> float:
        with self._lock:
            if self._worker is None or not self._worker.is_alive:  # one that is idle may have been killed from outside
                try:
                    self._worker = Worker(partial(_number, self.function), self.start)
                except WorkerStartError as error:
                    raise UserError(f"the grading worker does not start: {error}") from error
            try:
                return cast(float, self._worker.call(call, self.timeout))
            except WorkerTimeoutError as error:
                self.num_timeouts += 1
                self.last_failure = str(error)
            except WorkerError as error:
                self.num_crashes += 1
                self.last_failure = str(error)
        return 0.0


def _number(function: Callable[..., float], *arguments: Any) -> float:
    """In the worker: the function's value as a plain number, since one of another class would run its code in the parent."""
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
