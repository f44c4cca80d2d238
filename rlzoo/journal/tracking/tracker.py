"""The part of MLflow tracking that runs in the training process. It starts the follower and records how the run ended."""

from __future__ import annotations

import contextlib
import logging
import shlex
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
from rlzoo.journal.tracking.uploads import Status, Upload, Uploaded, tracking_uri, uploaded_to, without_password

logger = logging.getLogger("rlzoo")

QUIET_END = 10.0  # seconds to wait at the end of a run before logging a message about the wait


class Tracker:
    """Tracks a run in MLflow and sets its status to FINISHED, KILLED or FAILED when the block ends.

    The run only writes to its directory, and a separate process sends the contents. A slow or unreachable store therefore
    neither delays the run nor causes data loss. A tracker with ``is_on=False`` does nothing.
    """

    def __init__(self, is_on: bool) -> None:
        self._directory: Path | None = None
        self._upload: Upload | None = None
        self._trouble: str | None = None
        self._process: subprocess.Popen[str] | None = None
        if is_on:  # start the follower early, because it takes as long to load as the run itself
            command = [sys.executable, "-P", "-m", "rlzoo.journal.tracking.follow"]
            # the follower has its own session, so that Ctrl-C reaches only the run
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True
            )

    def begin(self, directory: Path, upload: Upload) -> None:
        """Start tracking a directory. A directory that was already tracked keeps its MLflow run."""
        if self._process is None:
            return
        former = Upload.read(directory)
        self._upload = upload if former is None else replace(upload, id=former.id, started=former.started)
        self._directory = directory
        self._upload.write(directory)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has exited; `__exit__` checks the exit code
            self._process.stdin.write(f"{directory.resolve()}\n")
            self._process.stdin.flush()

    def look(self) -> None:
        """Log a warning once if MLflow cannot be reached."""
        trouble = self._sent().trouble
        if trouble is not None and self._trouble is None:
            logger.warning(
                "MLflow at %s cannot be reached (%s); the run continues, and missing data is sent later",
                without_password(tracking_uri()),
                trouble,
            )
        self._trouble = trouble

    def conclude(self, step: int, metrics: Mapping[str, float], tags: Mapping[str, str]) -> None:
        """Log the metrics of the whole run and additional tags."""
        if self._upload is not None:
            self._upload = replace(self._upload, step=step, metrics=dict(metrics), tags={**self._upload.tags, **tags})

    @property
    def run_id(self) -> str | None:
        """The ID of the run in MLflow, or None until the store has the run."""
        return self._sent().run_id

    def _sent(self) -> Uploaded:
        stores = {} if self._directory is None else uploaded_to(self._directory)
        return stores.get(without_password(tracking_uri()), Uploaded(""))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._process is None:
            return
        if self._upload is not None and self._directory is not None:
            stopped = kind is not None and issubclass(kind, (KeyboardInterrupt, SystemExit))
            status: Status = "FINISHED" if kind is None else "KILLED" if stopped else "FAILED"
            with contextlib.nullcontext() if error is None else contextlib.suppress(OSError):  # do not hide the run's own error
                replace(self._upload, status=status, ended=time.time()).write(self._directory)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has exited without reading the directory
            self._process.stdin.close()
        try:
            if self._directory is not None:
                self._wait(self._process, self._directory)
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()

    def _wait(self, process: subprocess.Popen[str], directory: Path) -> None:
        """Wait for at most `LONGEST_END` seconds for the remaining data to be sent."""
        how = f"rlzoo sync {shlex.quote(str(directory))}"
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(QUIET_END)
        if process.returncode is None:
            logger.info("uploading the rest of the run to MLflow; to do this later instead, press Ctrl-C and run: %s", how)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, LONGEST_END - QUIET_END))
        if process.returncode != 0:
            late = f"it did not accept everything within {LONGEST_END:g} s"
            ended = f"the process that sends the data exited with code {process.returncode}"
            trouble = self._sent().trouble or (late if process.returncode in (None, -signal.SIGALRM) else ended)
            logger.warning("MLflow did not receive everything (%s); send the rest with: %s", trouble, how)
