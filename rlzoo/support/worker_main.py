"""What a worker process runs: calls one function for its parent, by path, with nothing but the standard library at first.

`rlzoo.support.workers` starts it as ``python -P worker_main.py CALLS LIFE``, with the descriptors of a socket that the calls
and their results go through and of a pipe that is never written to: the process is killed when the pipe's other end is closed,
so with its parent, whatever it computes at that moment.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import pickle
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

HEADER = struct.Struct("!Q")
"""What stands before a message: its length in bytes."""

SPARE_SECONDS = 1.0
"""CPU time in seconds that a call may take beyond its limit, before the kernel ends a worker whose parent has not."""


def send(connection: socket.socket, content: bytes) -> None:
    """Send one message."""
    connection.sendall(HEADER.pack(len(content)) + content)


def receive(connection: socket.socket) -> bytes:
    """The next message.

    Raises:
        EOFError: the other side is gone.
    """
    (length,) = HEADER.unpack(_exactly(connection, HEADER.size))
    return _exactly(connection, length)


def _exactly(connection: socket.socket, number: int) -> bytes:
    parts: list[bytes] = []
    while number:
        part = connection.recv(min(number, 2**20))
        if not part:
            raise EOFError("the connection was closed")
        parts.append(part)
        number -= len(part)
    return b"".join(parts)


def reason(error: BaseException) -> str:
    """The error as one line, even if it cannot say what it is."""
    try:
        text = " ".join(str(error).split())
    except BaseException:
        text = "an error without a text"
    return f"{type(error).__name__}: {text[:300]}"


def die_with(life: int) -> None:
    """Be killed by the kernel when the other end of a pipe is closed; no Python code has to run for it."""
    if sys.platform == "linux":  # elsewhere it is SIGIO, which ends a process that does not handle it
        fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        if not os.read(life, 1):  # it was closed before anybody listened
            os._exit(1)


def limit_cpu_time(seconds: float) -> None:
    """Let this process take so many more seconds on each CPU before the kernel ends it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(used.ru_utime + used.ru_stime + (seconds + SPARE_SECONDS) * (os.cpu_count() or 1))
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def serve(connection: socket.socket) -> None:
    """Answer calls with ``(is_done, value or reason)`` until the parent is gone."""
    path, pickled = pickle.loads(receive(connection))
    sys.path[:] = path
    try:
        function, start = pickle.loads(pickled)
        start()
    except BaseException as error:
        send(connection, _reply(False, reason(error)))
        return
    send(connection, _reply(True, None))
    while True:
        arguments, seconds = pickle.loads(receive(connection))
        send(connection, _called(function, arguments, seconds))


def _called(function: Callable[..., Any], arguments: bytes, seconds: float) -> bytes:
    try:
        limit_cpu_time(seconds)
        return _reply(True, function(*pickle.loads(arguments)))
    except BaseException as error:  # a function that leaves, or says that somebody pressed Ctrl-C, has failed as any other
        return _reply(False, reason(error))


def _reply(is_done: bool, value: object) -> bytes:
    """In JSON: what a worker answers must not run code in the parent."""
    return json.dumps([is_done, value]).encode()


def main(calls: int, life: int) -> None:
    """Set up the process, then serve."""
    die_with(life)
    with contextlib.suppress(OSError):  # what is printed is not part of what the parent prints
        os.dup2(2, 1)
    with socket.socket(fileno=calls) as connection, contextlib.suppress(EOFError, OSError):
        serve(connection)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
