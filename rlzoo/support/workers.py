"""Runs code in a separate process, which is replaced if the code hangs, crashes or uses too much memory."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

LONGEST_START = 300.0  # maximum seconds for a worker to start, including imports


class WorkerError(Exception):
    """Raised when a call failed; the message says why."""


class WorkerTimeoutError(WorkerError):
    """Raised when a call took too long and its worker was killed."""


class WorkerStartError(Exception):
    """Raised when a worker could not be started; the message says why."""


class Worker:
    """Calls one function in another process, which starts with the first call and is replaced if it ends.

    The process has the parent's import path, ends with the parent, receives no Ctrl-C, and prints to stderr. Timeouts use the
    monotonic clock. Calls are thread-safe.

    Attributes:
        num_timeouts: number of calls that took too long.
        num_crashes: number of calls that raised an error or ended the process.
        last_failure: the reason for the last failure.
    """

    def __init__(self, function: Callable[..., Any], start: Callable[[], object], memory: int | None = None) -> None:
        """Store the function, without starting a process.

        Args:
            function: a function that can be imported by name.
            start: called once in each new process, before the first call.
            memory: limit of the process's private memory in bytes; None for no limit.
        """
        self.function, self.start, self.memory = function, start, memory
        self.num_timeouts = self.num_crashes = 0
        self.last_failure = ""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The id of the process, if one was started."""
        return None if self._process is None else self._process.pid

    def call(self, arguments: tuple[Any, ...], timeout: float) -> Any:
        """Call the function and return its value, which must be JSON-serialisable.

        Args:
            arguments: arguments of the function.
            timeout: seconds after which the process is killed.

        Raises:
            WorkerStartError: the process could not be started.
            WorkerTimeoutError: the call took too long.
            WorkerError: the function raised an error or ended the process.
        """
        with self._lock:
            self._ensure_launched()
            try:
                self._send(pickle.dumps(pickle.dumps(arguments)), timeout)
                return self._receive(timeout)
            except WorkerError as error:
                self.count_failures(1, str(error), is_late=isinstance(error, WorkerTimeoutError))
                raise

    def call_generator(self, arguments: tuple[Any, ...], number: int, timeout: float) -> list[Any]:
        """Call a generator function and return its values; if the call fails, the missing values count as failures.

        Args:
            arguments: arguments of the function.
            number: number of values that the function yields, each JSON-serialisable.
            timeout: seconds without a value after which the process is killed.

        Raises:
            WorkerStartError: the process could not be started.
        """
        values: list[Any] = []
        with self._lock:
            self._ensure_launched()
            try:
                self._send(pickle.dumps(pickle.dumps(arguments)), timeout)
                while len(values) < number:
                    values.append(self._receive(timeout))
            except WorkerError as error:
                self.count_failures(number - len(values), str(error), is_late=isinstance(error, WorkerTimeoutError))
        return values

    def count_failures(self, number: int, reason: str, *, is_late: bool) -> None:
        """Count failed calls."""
        if is_late:
            self.num_timeouts += number
        else:
            self.num_crashes += number
        self.last_failure = reason

    def close(self) -> None:
        """End the process, which also happens on garbage collection and at exit; the next call starts another process."""
        with self._lock:
            if self._process is not None:
                self._end()

    def _ensure_launched(self) -> None:
        if self._process is None or not self._end.alive or self._process.poll() is not None:
            self._launch()

    def _launch(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", str(Path(__file__).with_name("worker_main.py")), str(theirs.fileno())]
        with theirs:
            try:  # a new session, so that only the parent gets Ctrl-C and the worker's children are killed with it
                self._process = subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise WorkerStartError(f"the process cannot be started: {error}") from error
        self._connection, self._replies = ours, ours.makefile("rb")
        self._end = weakref.finalize(self, _end, self._process, self._replies, ours)
        path = [entry or str(Path.cwd()) for entry in sys.path]
        try:
            self._send(pickle.dumps(path) + pickle.dumps((self.function, self.start, self.memory)), LONGEST_START)
            self._receive(LONGEST_START)
        except WorkerError as error:
            self._end()
            raise WorkerStartError(str(error)) from error

    def _send(self, message: bytes, timeout: float) -> None:
        with self._exchange(timeout):
            self._connection.sendall(message)

    def _receive(self, timeout: float) -> Any:
        """Return the value of the next reply."""
        with self._exchange(timeout):
            is_done, value = json.loads(self._replies.readline())
        if not is_done:
            raise WorkerError(value)
        return value

    @contextmanager
    def _exchange(self, timeout: float) -> Iterator[None]:
        """Kill the process if the block takes too long or fails."""
        self._connection.settimeout(timeout)
        try:
            yield
        except TimeoutError:
            self._end()
            raise WorkerTimeoutError(f"took longer than {timeout:g} s") from None
        except (OSError, ValueError, TypeError):
            raise WorkerError(self._ended()) from None
        except BaseException:  # Ctrl-C: the reply is no longer needed
            self._end()
            raise

    def _ended(self) -> str:
        """Return how the process ended."""
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        code = self._process.poll()
        self._end()
        if code is None:
            return "the worker process closed its connection"
        if code < 0:
            return f"the worker process was killed ({signal.Signals(-code).name})"
        return f"the worker process exited with code {code}"


def _end(process: subprocess.Popen[bytes], replies: BinaryIO, connection: socket.socket) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    replies.close()
    connection.close()
    assert process.stdin is not None
    process.stdin.close()
