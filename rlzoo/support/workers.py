"""A process of its own for code that may hang, crash or take too much: killed and replaced when it does."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlzoo.support.worker_main import receive, send

LONGEST_START = 300.0
"""Seconds that a worker may take to be ready for calls: libraries are imported then."""


class WorkerError(Exception):
    """A call that came to nothing; the text says why."""


class WorkerTimeoutError(WorkerError):
    """A call that took too long; the worker was killed."""


class WorkerStartError(Exception):
    """A worker that does not come to its first call; the text says why."""


class Worker:
    """One process, which calls one function.

    It imports nothing from the working directory that the parent would not find first, ends when the parent does, gets no
    Ctrl-C, and what it prints goes to stderr. Times are measured by the monotonic clock.

    Example:
        ``Worker(math.sqrt, gc.collect).call((2.0,), timeout=1.0)`` is 1.4142135623730951.
    """

    def __init__(self, function: Callable[..., Any], start: Callable[[], object]) -> None:
        """Start the process and wait until it is ready.

        Args:
            function: importable by name.
            start: called once, before the first call.

        Raises:
            WorkerStartError: it ended, or ``start`` failed.
        """
        ours, theirs = socket.socketpair()
        life, held = os.pipe()
        script = Path(__file__).with_name("worker_main.py")
        command = [sys.executable, "-P", str(script), str(theirs.fileno()), str(life)]
        try:  # a session of its own: Ctrl-C reaches the parent alone, and what the worker starts is killed with it
            self._process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(), life),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            os.close(held)
            ours.close()
            raise WorkerStartError(f"no process can be started: {error}") from error
        finally:
            theirs.close()
            os.close(life)
        self._connection = ours
        self.close = weakref.finalize(self, _end, self._process, ours, held)
        """End the process; also done when nobody holds this object any more, and at exit."""
        self._ready(function, start)

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it can be called."""
        return self.close.alive and self._process.poll() is None

    def call(self, arguments: tuple[Any, ...], timeout: float) -> Any:
        """The function's value, a number or text.

        Args:
            arguments: of the function.
            timeout: seconds, after which the process is killed.

        Raises:
            WorkerTimeoutError: it took longer.
            WorkerError: it raised anything, or ended the process.
        """
        is_done, value = self._exchange((pickle.dumps(arguments), timeout), timeout)
        if not is_done:
            raise WorkerError(value)
        return value

    def _ready(self, function: Callable[..., Any], start: Callable[[], object]) -> None:
        path = [entry or str(Path.cwd()) for entry in sys.path]
        try:
            is_ready, reason = self._exchange((path, pickle.dumps((function, start))), LONGEST_START)
        except WorkerError as error:
            raise WorkerStartError(str(error)) from error
        if not is_ready:
            self.close()
            raise WorkerStartError(reason)

    def _exchange(self, message: object, timeout: float) -> Any:
        self._connection.settimeout(timeout)
        try:
            send(self._connection, pickle.dumps(message))
            is_done, value = json.loads(receive(self._connection))
            return bool(is_done), value
        except TimeoutError:
            self.close()
            raise WorkerTimeoutError(f"took longer than {timeout:g} s") from None
        except (EOFError, OSError, ValueError, TypeError):
            raise WorkerError(self._ended()) from None
        except BaseException:  # Ctrl-C: nobody waits for the answer any more
            self.close()
            raise

    def _ended(self) -> str:
        """How the process ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        code = self._process.poll()
        self.close()
        if code is None:
            return "the worker process closed its connection"
        if code < 0:
            return f"the worker process was killed ({signal.Signals(-code).name})"
        return f"the worker process left ({code})"


def _end(process: subprocess.Popen[bytes], connection: socket.socket, held: int) -> None:
    connection.close()
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    os.close(held)
