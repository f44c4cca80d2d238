"""`rlzoo sync`: MLflow is told what it missed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from rlzoo.errors import UserError
from rlzoo.journal.tracking.record import FOLDER, Record, sent_to, tracking_uri, without_password
from rlzoo.journal.tracking.store import bounded_store
from rlzoo.journal.tracking.sync import Sync, describe
from rlzoo.support.lock import Lock


def sync(directories: Sequence[Path]) -> bool:
    """Send each directory what its store lacks; returns whether all of it could be sent."""
    console = Console(highlight=False, markup=False)
    for directory in directories:
        if Record.read(directory) is None:
            raise UserError(f"{str(directory)!r} holds no run that was tracked; name run directories, such as runs/*")
    told = [_sync(directory, console) for directory in directories]  # every one, whatever becomes of another
    return all(told)


def _sync(directory: Path, console: Console) -> bool:
    # of a run in the default store of another folder, that store
    known = list(sent_to(directory))
    uri = known[-1] if known and "MLFLOW_TRACKING_URI" not in os.environ else tracking_uri()
    lock = Lock(directory / FOLDER)
    try:
        outbox = Sync(directory, uri)
        with bounded_store():
            outbox.send(is_over=_is_over(directory))
    except Exception as error:
        console.print(f"{directory}: MLflow at {without_password(uri)} was not told: {describe(error, uri)}", soft_wrap=True)
        return False
    finally:
        lock.release()
    sent = f"{outbox.num_rows} steps and {outbox.num_files} files sent" if outbox.num_rows or outbox.num_files else "complete"
    console.print(f"{directory}: {sent}, run {outbox.sent.run_id} at {without_password(uri)}", soft_wrap=True)
    return True


def _is_over(directory: Path) -> bool:
    """Whether no process writes there any more."""
    try:
        Lock(directory).release()
    except UserError:
        return False
    return True
