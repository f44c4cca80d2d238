"""Signals that stop a run: the first one is noted until a step is over."""

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
"""Signals that stop a run. SIGHUP comes when a terminal is closed; ``nohup`` has it ignored, and it stays so."""

ONE_PRESS = 1.0  # seconds within which signals count as one: a terminal and a launcher may both pass on the same Ctrl-C

logger = logging.getLogger("rlzoo")


@dataclass(slots=True)
class StopRequest:
    """Whether somebody wants the run to stop, and by which signal."""

    signal: int | None = None
    since: float = 0.0  # by `time.monotonic`

    def end(self, message: str) -> NoReturn:
        """Stop as the signal would have: KeyboardInterrupt after Ctrl-C, else SystemExit.

        In a process that was not asked itself, but follows another that was, as after SIGTERM.
        """
        logger.warning(message)
        if self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + signal.SIGTERM)


@contextlib.contextmanager
def requested_stop() -> Iterator[StopRequest]:
    """Within the block, the first Ctrl-C, SIGTERM or SIGHUP is only noted; a second one acts at once."""
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    # not one that is ignored, as in a shell's background job, or that is not Python's
    handlers = {number: handler for number in STOPPING if (handler := signal.getsignal(number)) not in (None, signal.SIG_IGN)}

    def release() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        if stop.signal is None:
            stop.signal, stop.since = number, time.monotonic()
            logger.warning("stopping after this step; once more to stop at once")
        elif time.monotonic() - stop.since > ONE_PRESS:
            release()
            signal.raise_signal(number)

    for number in handlers:
        signal.signal(number, note)
    try:
        yield stop
    finally:
        release()
