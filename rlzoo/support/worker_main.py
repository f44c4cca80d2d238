"""The main program of a worker process, which calls one function for its parent.

`rlzoo.support.workers` runs this program as ``python -P worker_main.py CALLS``, where CALLS is a socket's descriptor for calls
and results. Its stdin is a pipe that is never written to. When the parent ends, the pipe closes, and the kernel kills this
process at once. The module imports only the standard library.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pickle
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def reason(error: BaseException) -> str:
    """Format an error, even if its ``__str__`` fails, as one line with the place in the user's code that raised it.

    For a UserError, the place is omitted, because the message already says what to do.
    """
    try:
        text = " ".join(str(error).split())
    except BaseException:
        text = "an error without a text"
    is_complete = any(kind.__name__ == "UserError" for kind in type(error).__mro__)  # this program cannot import the class
    named = f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
    return named if is_complete else named + _place(error)


def _place(error: BaseException) -> str:
    """Return `` (FILE:LINE)`` for the first file outside rlzoo and its adapters in the traceback, or an empty string."""
    package = f"{Path(__file__).parents[1]}{os.sep}"
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    is_own = {file: file.startswith(package) or Path(file).parent.name.startswith("rlzoo_") for file, _ in frames}
    outside = [(file, line) for file, line in frames if not is_own[file]]
    if not outside:
        return ""
    file = outside[0][0]
    line = [line for other, line in outside if other == file][-1]
    with contextlib.suppress(OSError, ValueError):
        file = str(Path(file).relative_to(Path.cwd()))
    return f" ({file}:{line})"


def die_with(life: int) -> None:
    """Have the kernel kill this process, without running any Python code, when the other end of a pipe closes."""
    if sys.platform == "linux":  # on other systems, the signal is SIGIO, which also kills a process without a handler
        fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        if not os.read(life, 1):  # the pipe was closed earlier
            os._exit(1)


def limit_memory(limit: int) -> None:
    """Limit this process's private memory to ``limit`` bytes. Allocations beyond this limit raise MemoryError.

    Linux's RLIMIT_DATA counts writable private memory but not the code of libraries. On other systems, the limit may have no
    effect. An existing lower limit is kept.
    """
    lowest = min([limit, *(value for value in resource.getrlimit(resource.RLIMIT_DATA) if value != resource.RLIM_INFINITY)])
    resource.setrlimit(resource.RLIMIT_DATA, (lowest, lowest))


def serve(connection: socket.socket) -> None:
    """Answer calls with lines ``[is_done, value or reason]`` until the parent is gone. The first call sets the function."""
    calls = connection.makefile("rb")
    sys.path[:] = pickle.load(calls)
    functions: list[Callable[..., Any]] = []

    def begin(function: Callable[..., Any], start: Callable[[], object], memory: int | None) -> None:
        if memory is not None:
            limit_memory(memory)
        start()
        functions.append(function)

    while True:
        for reply in _replies(functions[0] if functions else begin, pickle.load(calls)):
            connection.sendall(reply)


def _replies(function: Callable[..., Any], arguments: bytes) -> Iterator[bytes]:
    """Yield one reply or, if the function is a generator, one reply per value."""
    try:
        value = function(*pickle.loads(arguments))
        for result in value if isinstance(value, Iterator) else [value]:
            yield _reply(True, result)
    except GeneratorExit:
        raise
    except BaseException as error:  # SystemExit and KeyboardInterrupt are failures too
        yield _reply(False, reason(error))


def _reply(is_done: bool, value: object) -> bytes:
    """Encode a reply as JSON, which cannot run code in the parent."""
    return json.dumps([is_done, value]).encode() + b"\n"


def main(calls: int) -> None:
    """Set up the process and serve calls."""
    die_with(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    with contextlib.suppress(OSError):  # keep the worker's output out of the parent's stdout
        os.dup2(2, 1)
    with socket.socket(fileno=calls) as connection, contextlib.suppress(EOFError, OSError):
        serve(connection)


if __name__ == "__main__":
    main(int(sys.argv[1]))
