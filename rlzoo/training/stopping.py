"""Handles signals that stop a run. The first signal takes effect at the end of the step."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that stop a run. Closing a terminal sends SIGHUP, which stays ignored under ``nohup``."""

ONE_PRESS = 1.0  # seconds within which signals count as one, because a terminal and a launcher may both forward Ctrl-C

logger = logging.getLogger("rlzoo")


@dataclass(slots=True)
class StopRequest:
    """Records whether a signal has asked the run to stop, and which one."""

    signal: int | None = None
    since: float = 0.0  # time of the request, from `time.monotonic`

    def end(self, message: str) -> NoReturn:
        """Raise what the signal would have raised: KeyboardInterrupt after Ctrl-C, and SystemExit otherwise.

        A rank that received no signal stops as if it had received SIGTERM.
        """
        logger.warning(message)
        stopped = KeyboardInterrupt() if self.signal == signal.SIGINT else SystemExit(128 + signal.SIGTERM)
        stopped.is_saved = True  # type: ignore[union-attr]  # tells `watched_ranks` that the other ranks stop too
        raise stopped


@contextlib.contextmanager
def requested_stop() -> Iterator[StopRequest]:
    """Record the first Ctrl-C, SIGTERM or SIGHUP inside the block. A second signal takes effect immediately."""
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    # skip signals that are ignored, as in a shell's background job, or not handled by Python
    handlers = {number: handler for number in STOPPING if (handler := signal.getsignal(number)) not in (None, signal.SIG_IGN)}

    def release() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        if stop.signal is None:
            stop.signal, stop.since = number, time.monotonic()
            logger.warning("stopping after this step; interrupt again to stop at once")
        elif time.monotonic() - stop.since > ONE_PRESS:
            release()
            signal.raise_signal(number)

    for number in handlers:
        signal.signal(number, note)
    try:
        yield stop
    finally:
        release()
