"""The worker's side of alternating steps. The worker waits for its turn, runs one step, reports, and waits again."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import torch

_answers: list[TextIO] = []


def take_standard_output() -> None:
    """Reserve stdout for reports. The libraries' output goes to stderr."""
    _answers.append(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)


def wait() -> None:
    """Wait for this worker's turn, and exit if the parent process has ended."""
    if not sys.stdin.readline():
        os._exit(0)


def report(**measured: Any) -> None:
    """Report the measurements of a step."""
    print(json.dumps(measured), file=_answers[0], flush=True)


def settle() -> None:
    """If there is a GPU, wait for it to finish its work so that times are correct."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def forget_peak() -> None:
    """Reset this process's peak memory, or its peak GPU memory if there is a GPU."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_bytes() -> int:
    """Return the peak resident memory since `forget_peak` or, on a GPU, torch's peak allocated memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    line = next(line for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


class Clock:
    """Adds up the time spent in one phase.

    Example:
        ``trainer._generate = clock.around(trainer._generate)``
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Any, after: Any = None) -> Any:
        """Wrap a function so that the time spent in it is added up."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                settle()
                self.seconds += time.perf_counter() - started
                if after is not None:
                    after()

        return timed

    def take(self) -> float:
        """Return the total time in seconds and reset it."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds
