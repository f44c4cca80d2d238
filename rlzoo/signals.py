"""Signals that stop a run, held back while something is written that must not be cut in two."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def held_signals() -> Iterator[None]:
    """Deliver Ctrl-C and SIGTERM that arrive within the block at its end; a second one goes through at once.

    Python raises them between any two instructions. In the middle of a database transaction, or in a callback of the
    garbage collector, which swallows every exception, they would corrupt what is written or be lost.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python runs handlers in the main thread only: nothing can be raised here
        return
    before = {number: signal.getsignal(number) for number in STOPPING}
    handlers = {number: handler for number, handler in before.items() if handler is not None}
    arrived: list[int] = []

    def release() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def hold(number: int, frame: FrameType | None) -> None:
        if arrived:
            release()
            signal.raise_signal(number)
        arrived.append(number)

    for number in handlers:
        signal.signal(number, hold)
    try:
        yield
    finally:
        release()
        if arrived:
            signal.raise_signal(arrived[0])
