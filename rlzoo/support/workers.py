"""A process of its own for code that may hang, crash or take too much: killed and replaced when it does."""

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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

LONGEST_START = 300.0  # seconds that a worker may take to be ready for calls: libraries are imported then


class WorkerError(Exception):
    """A call that failed; the text says why."""


class WorkerTimeoutError(WorkerError):
    """A call that took too long; the worker was killed."""


class WorkerStartError(Exception):
    """A worker that did not get ready for its first call; the text says why."""


class Worker:
    """Calls one function in another process, which is started for the first call and replaced once it has ended.

    The process imports nothing from the working directory that the parent would not find first, ends when the parent does, gets
    no Ctrl-C, and prints to stderr. Times are measured by the monotonic clock. Safe to call from any thread.

    Attributes:
        num_timeouts: calls that took too long.
        num_crashes: calls that raised, or ended the process.
        last_failure: why the last of these failed.
    """

    def __init__(self, function: Callable[..., Any], start: Callable[[], object], memory: int | None = None) -> None:
        """Keep what to run; nothing starts yet.

        Args:
            function: importable by name.
            start: called once in each new process, before the first call.
            memory: bytes of its own that the process may hold; None for no limit.
        """
        self.function, self.start, self.memory = function, start, memory
        self.num_timeouts = self.num_crashes = 0
        self.last_failure = ""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process, if one was started."""
        return None if self._process is None else self._process.pid

    def call(self, arguments: tuple[Any, ...], timeout: float) -> Any:
        """The function's value, a number or text.

        Args:
            arguments: of the function.
            timeout: seconds, after which the process is killed.

        Raises:
            WorkerStartError: no process gets ready for the call.
            WorkerTimeoutError: it took longer.
            WorkerError: it raised anything, or ended the process.
        """
        with self._lock:
            if self._process is None or not self._end.alive or self._process.poll() is not None:
                self._launch()
            try:
                return self._exchange(pickle.dumps((pickle.dumps(arguments), timeout)), timeout)
            except WorkerError as error:
                is_late = isinstance(error, WorkerTimeoutError)
                self.num_timeouts += is_late
                self.num_crashes += not is_late
                self.last_failure = str(error)
                raise

    def close(self) -> None:
        """End the process; the next call starts another. Also done when nothing refers to this object, and at exit."""
        with self._lock:
            if self._process is not None:
                self._end()

    def _launch(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", str(Path(__file__).with_name("worker_main.py")), str(theirs.fileno())]
        with theirs:
            try:  # a session of its own: Ctrl-C reaches the parent alone, and what the worker starts is killed with it
                self._process = subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise WorkerStartError(f"no process can be started: {error}") from error
        self._connection, self._replies = ours, ours.makefile("rb")
        self._end = weakref.finalize(self, _end, self._process, self._replies, ours)
        path = [entry or str(Path.cwd()) for entry in sys.path]
        try:
            self._exchange(pickle.dumps(path) + pickle.dumps((self.function, self.start, self.memory)), LONGEST_START)
        except WorkerError as error:
            self._end()
            raise WorkerStartError(str(error)) from error

    def _exchange(self, message: bytes, timeout: float) -> Any:
        """The value that the process answers; the process is killed if no answer comes."""
        self._connection.settimeout(timeout)
        try:
            self._connection.sendall(message)
            is_done, value = json.loads(self._replies.readline())
        except TimeoutError:
            self._end()
            raise WorkerTimeoutError(f"took longer than {timeout:g} s") from None
        except (OSError, ValueError, TypeError):
            raise WorkerError(self._ended()) from None
        except BaseException:  # Ctrl-C: nobody waits for the answer any more
            self._end()
            raise
        if not is_done:
            raise WorkerError(value)
        return value

    def _ended(self) -> str:
        """How the process ended."""
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        code = self._process.poll()
        self._end()
        if code is None:
            return "the worker process closed its connection"
        if code < 0:
            return f"the worker process was killed ({signal.Signals(-code).name})"
        return f"the worker process left ({code})"


def _end(process: subprocess.Popen[bytes], replies: BinaryIO, connection: socket.socket) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    replies.close()
    connection.close()
    assert process.stdin is not None
    process.stdin.close()
