"""The follower process, which sends a run to MLflow during training: ``python -m rlzoo.journal.tracking.follow``.

It reads the path of the run directory from stdin, which closes when the training process ends, whatever the reason. The
follower then has `LONGEST_END` seconds to send the remaining data.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rlzoo.journal.tracking.store import describe, load_mlflow
from rlzoo.journal.tracking.sync import Sync
from rlzoo.journal.tracking.uploads import FOLDER, tracking_uri
from rlzoo.support.lock import Lock

POLL = 1.0  # seconds between checks of the directory
LONGEST_PAUSE = 30.0  # maximum time in seconds between attempts while the store cannot be reached
PATIENCE = 15.0  # time in seconds after the run's end to repeat failed attempts; `rlzoo sync` sends the rest
LONGEST_END = 60.0  # time in seconds after the run's end to send data, even if the store responds


def follow(sync: Sync, is_over: Callable[[float], bool], uri: str) -> bool:
    """Send new data until the run is over, and return whether everything was sent.

    Args:
        sync: the sender of the run directory.
        is_over: waits for at most the given number of seconds until the run is over, and returns whether the run is over.
        uri: address of the store.
    """
    pause, until = 0.0, math.inf
    while True:
        over = is_over(pause)
        if over:
            until = min(until, time.monotonic() + PATIENCE)
        try:
            sync.send(is_over=over)
            if over:
                return True
            pause = POLL
        except Exception as error:
            with contextlib.suppress(OSError):  # the run itself reports a full disk
                sync.report(describe(error, uri))
            if time.monotonic() > until:
                return False
            pause = min(2.0 if over else LONGEST_PAUSE, 2 * max(pause, POLL / 2))


def main() -> int:
    """Follow the directory named in the first line of stdin. Do nothing if stdin is empty."""
    parent, line = os.getppid(), ""
    gc.set_threshold(50_000, 10, 10)  # most of the objects that imports create are kept
    try:
        os.environ.setdefault("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "true")
        load_mlflow()  # meanwhile, the run loads its model
        line = sys.stdin.readline().rstrip("\n")
        return 0 if not line or _follow(Path(line), parent) else 1
    except Exception as error:  # a damaged record.json, another follower, a full disk, or an MLflow that cannot be imported
        print(f"cannot send {line or 'the run'} to MLflow: {describe(error, tracking_uri())}", file=sys.stderr)
        return 1


def _follow(directory: Path, parent: int) -> bool:
    """Follow a directory until the process ``parent`` ends, and return whether everything was sent."""
    from mlflow.environment_variables import MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    ended, uri = False, tracking_uri()
    monitor: SystemMetricsMonitor | None = None

    def is_over(seconds: float) -> bool:
        nonlocal ended, monitor
        if monitor is None and sync.num_rows and MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING.get():
            monitor = SystemMetricsMonitor(sync.uploaded.run_id, resume_logging=True, tracking_uri=uri)
            monitor.start()
        if ended:
            time.sleep(seconds)
        elif select.select([sys.stdin], [], [], seconds)[0] or os.getppid() != parent:
            ended = True
            signal.setitimer(signal.ITIMER_REAL, LONGEST_END)  # the timer ends this process even if its threads block
            if monitor is not None:
                monitor.finish()
        return ended

    # the follower of a killed run may hold the lock for up to `LONGEST_END` seconds
    lock = Lock(directory / FOLDER, seconds=LONGEST_END + 30)
    try:
        sync = Sync(directory, uri)
        return follow(sync, is_over, uri)
    finally:
        lock.release()


if __name__ == "__main__":
    sys.exit(main())
