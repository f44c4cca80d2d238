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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from rlzoo.core.errors import UserError

LONGEST_START = 300.0  # maximum time in seconds for a worker to start, including imports


class Worker:
    """Calls one function in another process, which starts with the first call and is replaced if it ends.

    The process has the parent's import path, ends with the parent, receives no Ctrl-C, and prints to stderr. Timeouts use the
    monotonic clock. Calls are thread-safe.

    Attributes:
        num_failures: number of calls that took too long, raised an error or ended the process.
        last_failure: the reason for the last failure.
        process: the process, if one has been started.
        title: description of the process for the error message if it cannot start.
    """

    title = "the grading worker"

    def __init__(self, function: Callable[..., Any], start: Callable[[], object], memory: int | None = None) -> None:
        """Store the function without starting a process.

        Args:
            function: a function that can be imported by name.
            start: called once in each new process, before the first call.
            memory: limit on the process's private memory in bytes; None for no limit.
        """
        self.function, self.start, self.memory = function, start, memory
        self.num_failures, self.last_failure = 0, ""
        self.process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def call(self, arguments: tuple[Any, ...], timeout: float, number: int = 1) -> tuple[list[Any], str]:
        """Call the function. Return its values and the reason why values are missing (empty if none are missing).

        Args:
            arguments: arguments of the function.
            timeout: time in seconds without a value after which the process is killed.
            number: number of JSON-serialisable values that a generator function yields; 1 for any other function.

        Raises:
            UserError: the process could not be started.
        """
        with self._lock:
            if self.process is None or not self._end.alive or self.process.poll() is not None:
                self._launch()
            values, failure = self._exchange(pickle.dumps(pickle.dumps(arguments)), number, timeout)
        if failure:
            self.count_failures(number - len(values), failure)
        return values, failure

    def count_failures(self, number: int, reason: str) -> None:
        """Count failed calls."""
        self.num_failures += number
        self.last_failure = reason

    def close(self) -> None:
        """End the process, which also happens on garbage collection and at exit. The next call starts another process."""
        with self._lock:
            if self.process is not None:
                self._end()

    def _launch(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", str(Path(__file__).with_name("worker_main.py")), str(theirs.fileno())]
        with theirs:
            try:  # start a new session, so that only the parent gets Ctrl-C and the worker's children are killed with it
                self.process = subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise UserError(f"{self.title} cannot start: {error}") from error
        self._connection, self._replies = ours, ours.makefile("rb")
        self._end = weakref.finalize(self, _end, self.process, self._replies, ours)
        path = pickle.dumps([entry or str(Path.cwd()) for entry in sys.path])
        setup = pickle.dumps((self.function, self.start, self.memory))
        _, failure = self._exchange(path + pickle.dumps(setup), 1, LONGEST_START)
        if failure:
            self._end()
            raise UserError(f"{self.title} cannot start: {failure.removeprefix('UserError: ')}")

    def _exchange(self, message: bytes, number: int, timeout: float) -> tuple[list[Any], str]:
        """Send a message. Return the replies' values and the reason why values are missing. A late process is killed."""
        values: list[Any] = []
        try:
            self._connection.settimeout(timeout)
            self._connection.sendall(message)
            while len(values) < number:
                is_done, value = json.loads(self._replies.readline())
                if not is_done:
                    return values, value
                values.append(value)
        except TimeoutError:
            self._end()
            return values, f"took longer than {timeout:g} s"
        except (OSError, ValueError, TypeError):
            return values, self._ended()
        except BaseException:  # for example, Ctrl-C; the reply is no longer needed
            self._end()
            raise
        return values, ""

    def _ended(self) -> str:
        """Return how the process ended."""
        assert self.process is not None
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1)
        code = self.process.poll()
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
