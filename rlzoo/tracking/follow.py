"""The process beside a run that keeps MLflow up with it: ``python -m rlzoo.tracking.follow``, directory on stdin.

It ends when its stdin does, so when the run's process is gone, in whatever way; then it sends what is left.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rlzoo.errors import UserError
from rlzoo.garbage import collect_seldom
from rlzoo.lock import Lock
from rlzoo.tracking.machine import Machine
from rlzoo.tracking.record import FOLDER, Record, tracking_uri
from rlzoo.tracking.sync import Sync, describe

POLL = 1.0
"""Seconds between looks at the directory."""

LONGEST_PAUSE = 30.0
"""Seconds between tries, at most, while the store cannot be reached."""

PATIENCE = 15.0
"""Seconds without success after the run's end before the rest is left to `rlzoo sync`."""


def follow(sync: Sync, is_over: Callable[[float], bool], uri: str) -> bool:
    """Send what is new until the run is over; returns whether all was sent.

    Args:
        sync: what sends.
        is_over: waits for so many seconds, or until the run is over, and says whether it is.
        uri: of the store.
    """
    pause, worked = 0.0, time.monotonic()
    while True:
        over = is_over(pause)
        try:
            sync.send(is_over=over)
            pause, worked = POLL, time.monotonic()
            if over:
                return True
        except Exception as error:
            sync.report(describe(error, uri))
            pause = min(LONGEST_PAUSE, 2 * max(pause, POLL / 2))
            if not over:
                worked = time.monotonic()  # patience is counted from the end
            elif time.monotonic() - worked > PATIENCE:
                return False
            else:
                pause = min(pause, 2.0)


def main() -> int:
    """Follow the directory named by the first line of stdin; without one, do nothing."""
    parent = os.getppid()
    collect_seldom()
    # loaded while the run loads its model
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")  # a new store tells of every table it makes
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # we try again ourselves
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    import mlflow  # noqa: F401

    line = sys.stdin.readline().rstrip("\n")
    if not line:
        return 0
    directory, ended = Path(line), False

    def is_over(seconds: float) -> bool:
        nonlocal ended
        if ended:
            time.sleep(seconds)
        else:
            ended = bool(select.select([sys.stdin], [], [], seconds)[0]) or os.getppid() != parent
            if ended:
                machine.end()
        return ended

    # one that follows a run which was killed just before is about to end
    try:
        lock = Lock.wait_for(directory / FOLDER, seconds=60)
        try:
            record = Record.read(directory)
            machine = Machine(directory, 0.0 if record is None else record.machine_every).begin()
            return 0 if follow(Sync(directory, tracking_uri()), is_over, tracking_uri()) else 1
        finally:
            lock.release()
    except (UserError, OSError) as error:  # what is in the folder is damaged, or the disk is full
        print(f"MLflow is not told of {directory}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
