"""The run's side of tracking: starts the process that tells MLflow, and says how the run ended."""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from rlzoo.journal.tracking.follow import LONGEST_END
from rlzoo.journal.tracking.record import Record, Sent, Status, sent_to, tracking_uri, without_password

logger = logging.getLogger("rlzoo")

QUIET_END = 5.0  # seconds that the end of a run waits before it logs that it waits


class Tracker:
    """A run in MLflow, ended as FINISHED, KILLED or FAILED by the way its block is left; switched off, nothing.

    The run only writes to its directory, which a process of its own follows: a store that is slow, or down, holds nothing
    up and loses nothing.
    """

    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on
        self._directory: Path | None = None
        self._record: Record | None = None
        self._trouble: str | None = None
        self._process: subprocess.Popen[str] | None = None
        if is_on:  # it takes as long to load as the run does
            command = [sys.executable, "-P", "-m", "rlzoo.journal.tracking.follow"]
            # a session of its own: Ctrl-C reaches the run alone
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True
            )

    def begin(self, directory: Path, record: Record) -> None:
        """Track a directory from now on; one that was tracked before keeps its run in MLflow."""
        if self._process is None:
            return
        former = Record.read(directory)
        self._record = record if former is None else replace(record, id=former.id, started=former.started)
        self._directory = directory
        self._record.write(directory)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone already; its exit code is looked at in the end
            self._process.stdin.write(f"{directory.resolve()}\n")
            self._process.stdin.flush()

    def look(self) -> None:
        """Warn once of what keeps MLflow from being told."""
        trouble = self._sent().trouble
        if trouble is not None and self._trouble is None:
            logger.warning(
                "MLflow at %s cannot be reached (%s); the run continues, and what is missing is sent later",
                without_password(tracking_uri()),
                trouble,
            )
        self._trouble = trouble

    def conclude(self, step: int, metrics: Mapping[str, float], tags: Mapping[str, str]) -> None:
        """Log the metrics of the whole run, and more tags."""
        if self._record is not None:
            self._record = replace(self._record, step=step, metrics=dict(metrics), tags={**self._record.tags, **tags})

    @property
    def run_id(self) -> str | None:
        """MLflow's run, once the store has one."""
        return self._sent().run_id

    def _sent(self) -> Sent:
        stores = {} if self._directory is None else sent_to(self._directory)
        return stores.get(without_password(tracking_uri()), Sent(""))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._process is None:
            return
        if self._record is not None and self._directory is not None:
            stopped = kind is not None and issubclass(kind, (KeyboardInterrupt, SystemExit))
            status: Status = "FINISHED" if kind is None else "KILLED" if stopped else "FAILED"
            with contextlib.nullcontext() if error is None else contextlib.suppress(OSError):  # the error is what it ended with
                replace(self._record, status=status, ended=time.time()).write(self._directory)
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            if self._directory is not None:
                self._wait(self._process, self._directory)
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()

    def _wait(self, process: subprocess.Popen[str], directory: Path) -> None:
        """Wait until the rest was sent, `LONGEST_END` seconds at most."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(QUIET_END)
        if process.returncode is None:
            logger.info("MLflow is sent the rest; Ctrl-C leaves that to: rlzoo sync %s", directory)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, LONGEST_END - QUIET_END))
        if process.returncode != 0:
            late = f"it has not taken everything within {LONGEST_END:g} s"
            ended = f"the process that tells it ended with {process.returncode}"
            trouble = self._sent().trouble or (late if process.returncode in (None, -signal.SIGALRM) else ended)
            logger.warning("MLflow was not told everything (%s); send the rest with: rlzoo sync %s", trouble, directory)
