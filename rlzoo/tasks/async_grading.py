"""Grades responses with a user's ``async def`` reward, such as a judge on a server. Many calls run concurrently."""

from __future__ import annotations

import asyncio
import inspect
import random
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from http.client import IncompleteRead
from typing import Any

from rlzoo.support.worker_main import reason
from rlzoo.support.workers import Worker
from rlzoo.tasks.grading import Grade, checked_grade

SPARE = 10.0  # seconds after a call's time limit at which a worker that sends no result is killed
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # first and longest pause between two attempts, in seconds
BUSY = (408, 425, 429)  # HTTP status codes, besides 5xx, after which a call is retried
UNREACHABLE = (ConnectionError, TimeoutError, socket.gaierror, IncompleteRead)

AsyncFunction = Callable[..., Awaitable[Grade]]
Outcome = tuple[Grade | None, str, bool]
"""The reward (None if the call failed), the reason for the failure (otherwise empty), and whether the call timed out."""


class AsyncGrader(Worker):
    """A worker process in which up to ``concurrency`` calls to a coroutine function run at once.

    A call that fails because a server is unreachable or busy is retried until its time limit is reached. If a call times out,
    the process is replaced after the batch so that no task, thread or connection is left behind.
    """

    def __init__(self, load: Callable[[], AsyncFunction], timeout: float, concurrency: int) -> None:
        """Store the arguments. The first call starts the worker.

        Args:
            load: returns the coroutine function. It must be importable by name, because it runs in another process.
            timeout: time limit in seconds for one response, including all attempts.
            concurrency: maximum number of concurrent calls.
        """
        super().__init__(partial(_grade_all, load, timeout, concurrency), load)
        self.timeout = timeout

    def grade(self, calls: Sequence[tuple[Any, ...]]) -> list[Grade | None]:
        """Return the function's value for each call, or None for a call that failed.

        Raises:
            UserError: no worker can be started.
        """
        rewards: list[Grade | None] = [None] * len(calls)
        # at least one running call ends within the limit, so a longer silence means that the function blocks the event loop
        outcomes, _ = self.call((list(calls),), self.timeout + SPARE, len(calls))
        for index, (reward, failure, _) in outcomes:
            rewards[index] = reward
            if failure:
                self.count_failures(1, failure)
        if any(is_late for _, (_, _, is_late) in outcomes):
            self.close()
        return rewards


def is_coroutine_function(function: Callable[..., Any]) -> bool:
    """Return whether a function, or an object's ``__call__`` method, is defined with ``async def``."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _grade_all(
    load: Callable[[], AsyncFunction], timeout: float, concurrency: int, calls: list[tuple[Any, ...]]
) -> Iterator[tuple[int, Outcome]]:
    """Yield the index and the outcome of each call as soon as it ends. This function runs in the worker."""
    loop, function = _event_loop(concurrency), load()
    free, ended = asyncio.Semaphore(concurrency), asyncio.Queue[tuple[int, Outcome]]()

    async def grade(index: int, call: tuple[Any, ...]) -> None:
        async with free:
            ended.put_nowait((index, await _outcome(function, call, timeout)))

    tasks = [loop.create_task(grade(index, call)) for index, call in enumerate(calls)]
    for _ in tasks:
        yield loop.run_until_complete(ended.get())


@cache
def _event_loop(num_threads: int) -> asyncio.AbstractEventLoop:
    """Return the worker's event loop. The same loop serves all calls so that a reward function can keep its connections."""
    loop = asyncio.new_event_loop()
    loop.set_default_executor(ThreadPoolExecutor(num_threads))  # for asyncio.to_thread; the default is 6 threads on 2 cores
    return loop


async def _outcome(function: AsyncFunction, call: tuple[Any, ...], timeout: float) -> Outcome:
    """Call the function until it returns, fails permanently, or exceeds its time limit."""
    last, pause = "", FIRST_PAUSE
    try:
        async with asyncio.timeout(timeout):
            while True:
                try:
                    return checked_grade(await function(*call)), "", False
                except Exception as error:
                    if not is_transient(error):
                        return None, reason(error), False
                    last = f"; the last attempt failed with {reason(error)}"
                await asyncio.sleep(random.uniform(pause / 2, pause))
                pause = min(2 * pause, LONGEST_PAUSE)
    except TimeoutError:
        return None, f"took longer than {timeout:g} s{last}", True
    except (asyncio.CancelledError, SystemExit, KeyboardInterrupt) as error:
        return None, reason(error), False


def is_transient(error: Exception) -> bool:
    """Return whether an error from any HTTP library means that a server is unreachable or busy and a retry may succeed.

    Example:
        >>> from urllib.error import HTTPError
        >>> [is_transient(HTTPError("http://judge", code, "", {}, None)) for code in (503, 429, 401)]
        [True, True, False]
    """
    places = (error, getattr(error, "response", None))  # for urllib, aiohttp, httpx, requests or openai
    values = [getattr(place, name, None) for place in places for name in ("status_code", "status", "code")]
    if status := next((value for value in values if type(value) is int), None):
        return status in BUSY or status >= 500
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UNREACHABLE):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
