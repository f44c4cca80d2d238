"""Grading in a worker process that is killed and replaced when an answer makes it hang or crash."""

from __future__ import annotations

import multiprocessing
import resource
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field

from rlzoo.errors import UserError
from rlzoo.tasks.task import Task

MAX_BYTES = 768 * 2**20
"""Memory that a worker may take beside its libraries; 9^{9^{9}} would have all there is."""


class Grader:
    """One worker process, started when first needed and reused; safe to call from any thread.

    Attributes:
        num_timeouts: answers that took longer than ``timeout`` and counted 0.
        num_crashes: answers that raised or ended the worker and counted 0.
    """

    def __init__(self, function: Callable[..., float], start: Callable[[], None], timeout: float) -> None:
        """Keep what to run; nothing starts yet.

        Args:
            function: grades one call's arguments; importable by name, for it runs in another process.
            start: run once in each new worker, outside the time limit.
            timeout: seconds for one answer.
        """
        self.function, self.start, self.timeout = function, start, timeout
        self.num_timeouts = 0
        self.num_crashes = 0
        self._lock = threading.Lock()
        self._pool: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Grader, (self.function, self.start, self.timeout)

    def grade(self, calls: Sequence[tuple[Any, ...]]) -> list[float]:
        """The function's value for each call; 0.0 where it hung or crashed.

        Raises:
            UserError: no worker can be started.
        """
        results: list[float] = []
        if not calls:
            return results
        for _ in range(2):  # an idle worker may have been killed from outside: start another, once
            try:
                pool = self._running_pool()
                futures = [pool.schedule(self.function, args=call, timeout=self.timeout) for call in calls[len(results) :]]
                for future in futures:
                    results.append(self._value(future))
                return results
            except (BrokenProcessPool, _PoolGoneError):
                self.close()
        raise UserError(
            "the grading worker does not start (see above): a script that trains must do so under "
            "if __name__ == '__main__':, because the worker imports it"
        )

    def close(self) -> None:
        """End the worker; the next ``grade`` starts another."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.stop()
            pool.join()

    def _running_pool(self) -> Any:
        from pebble import ProcessPool

        with self._lock:
            if self._pool is None:  # spawn: a forked copy of a process that holds threads and a GPU may deadlock
                context = multiprocessing.get_context("spawn")
                self._pool = ProcessPool(max_workers=1, initializer=_start_worker, initargs=[self.start], context=context)
            if not self._pool.active:
                raise _PoolGoneError
            return self._pool

    def _value(self, future: Any) -> float:
        try:
            return float(future.result())
        except BrokenProcessPool:
            raise
        except TimeoutError:
            with self._lock:
                self.num_timeouts += 1
        except (Exception, SystemExit):  # ProcessExpired, or whatever the library raised on this answer
            with self._lock:
                self.num_crashes += 1
        return 0.0


def _start_worker(start: Callable[[], None]) -> None:
    """Make a worker ready, and let no answer take more memory than `MAX_BYTES`: one that asks for more raises or crashes."""
    start()
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[5])  # what the libraries took already
        limit = pages * resource.getpagesize() + MAX_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    except (OSError, ValueError):  # not on Linux, or less is allowed here anyway
        return


class _PoolGoneError(Exception):
    """The pool noticed that its worker died while idle."""


class WorkerGradedTask(Task):
    """A task whose answers are graded in a worker process, because grading them may hang."""

    timeout: float = Field(default=5.0, gt=0, le=3600, description="seconds to grade one answer; longer counts 0")

    @cached_property
    def _grader(self) -> Grader:
        return self._make_grader()

    @abstractmethod
    def _make_grader(self) -> Grader:
        """A grader with the task's own function."""

    @property
    def num_timeouts(self) -> int:
        """Answers so far whose grading took too long."""
        return self._grader.num_timeouts

    @property
    def num_crashes(self) -> int:
        """Answers so far whose grading crashed."""
        return self._grader.num_crashes

    def close(self) -> None:
        """End the worker process; grading again starts another."""
        self._grader.close()
