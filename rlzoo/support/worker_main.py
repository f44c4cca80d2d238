"""What a worker process runs: calls one function for its parent, by path, with nothing but the standard library at first.

`rlzoo.support.workers` starts it as ``python -P worker_main.py CALLS``: the number is the descriptor of a socket that the calls
and their results go through. Its stdin is a pipe that is never written to: the kernel kills the process when the other end is
closed, so with the parent, whatever the process computes at that moment.
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
import sys
from collections.abc import Callable
from typing import Any

SPARE_SECONDS = 1.0
"""CPU time in seconds that a call may take beyond its limit, before the kernel ends a worker whose parent has not."""


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
        if not os.read(life, 1):  # it was closed before this process listened
            os._exit(1)


def limit_memory(limit: int) -> None:
    """Let this process hold at most ``limit`` bytes of its own; an allocation beyond raises MemoryError.

    Linux's RLIMIT_DATA counts private memory that can be written, not the code of libraries; elsewhere this may be without
    effect. A limit that is lower already stays.
    """
    given = [value for value in resource.getrlimit(resource.RLIMIT_DATA) if value != resource.RLIM_INFINITY]
    lowest = min([limit, *given])
    resource.setrlimit(resource.RLIMIT_DATA, (lowest, lowest))


def limit_cpu_time(seconds: float) -> None:
    """Let this process take so many more seconds on each CPU before the kernel ends it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(used.ru_utime + used.ru_stime + (seconds + SPARE_SECONDS) * (os.cpu_count() or 1))
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def serve(connection: socket.socket) -> None:
    """Answer calls with a line ``[is_done, value or reason]`` until the parent is gone."""
    calls = connection.makefile("rb")
    sys.path[:] = pickle.load(calls)
    try:
        function, start, memory = pickle.load(calls)
        if memory is not None:
            limit_memory(memory)
        start()
    except BaseException as error:
        connection.sendall(_reply(False, reason(error)))
        return
    connection.sendall(_reply(True, None))
    while True:
        arguments, seconds = pickle.load(calls)
        connection.sendall(_called(function, arguments, seconds))


def _called(function: Callable[..., Any], arguments: bytes, seconds: float) -> bytes:
    try:
        limit_cpu_time(seconds)
        return _reply(True, function(*pickle.loads(arguments)))
    except BaseException as error:  # a function that leaves, or raises KeyboardInterrupt, has failed as any other
        return _reply(False, reason(error))


def _reply(is_done: bool, value: object) -> bytes:
    """In JSON: what a worker answers must not run code in the parent."""
    return json.dumps([is_done, value]).encode() + b"\n"


def main(calls: int) -> None:
    """Set up the process, then serve."""
    die_with(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    with contextlib.suppress(OSError):  # what is printed is not part of what the parent prints
        os.dup2(2, 1)
    with socket.socket(fileno=calls) as connection, contextlib.suppress(EOFError, OSError):
        serve(connection)


if __name__ == "__main__":
    main(int(sys.argv[1]))
