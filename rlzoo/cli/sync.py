"""`rlzoo sync`: uploads run data that MLflow does not have yet."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from rlzoo.cli.console import Plain
from rlzoo.cli.exits import FAILED
from rlzoo.core.errors import UserError
from rlzoo.support.lock import Lock, is_locked


def sync(runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run directories, such as runs/*.")]) -> None:
    """Upload run data that has not reached MLflow. Nothing is sent twice."""
    from rlzoo.journal.tracking.uploads import FOLDER

    tracked = [directory for directory in runs if (directory / FOLDER / "record.json").is_file()]
    if not tracked:
        raise UserError(f"{str(runs[0])!r} is not the directory of a tracked run; pass run directories, such as runs/*")
    sent = [_sync(directory, Plain()) for directory in tracked]  # sync all of them, even if one fails
    if not all(sent):
        raise typer.Exit(FAILED)


def _sync(directory: Path, console: Plain) -> bool:
    from rlzoo.journal.tracking.store import describe
    from rlzoo.journal.tracking.sync import Sync
    from rlzoo.journal.tracking.uploads import FOLDER, tracking_uri, uploaded_to, without_password

    uri, known = tracking_uri(), list(uploaded_to(directory))
    if known and without_password(uri) not in known and not os.environ.get("MLFLOW_TRACKING_URI"):
        # a directory from someone else could name any server, which would then receive the credentials
        remark = ", which receives your credentials" if known[-1].startswith("http") else ""
        console.print(
            f"{directory}: not sent, because its store is {known[-1]!r}; to confirm this address{remark}, "
            f"set MLFLOW_TRACKING_URI={shlex.quote(known[-1])}"
        )
        return False
    lock = Lock(directory / FOLDER)
    try:
        outbox = Sync(directory, uri)
        outbox.send(is_over=not is_locked(directory))
    except Exception as error:
        console.print(f"{directory}: upload to MLflow at {without_password(uri)} failed: {describe(error, uri)}")
        return False
    finally:
        lock.release()
    sent = f"{outbox.num_rows} steps and {outbox.num_files} files sent" if outbox.num_rows or outbox.num_files else "complete"
    console.print(f"{directory}: {sent}, run {outbox.uploaded.run_id} at {without_password(uri)}")
    return True
