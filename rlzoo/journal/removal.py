"""Removes runs. Only files that rlzoo wrote are removed."""

from __future__ import annotations

import hashlib
import re
from contextlib import ExitStack, suppress
from pathlib import Path

from rlzoo.core.errors import UserError, shown
from rlzoo.core.settings import user_path
from rlzoo.journal.checkpoints import TIDIED, discard, own_checkpoints, tidy
from rlzoo.journal.rollout_file import LARGEST_STEP
from rlzoo.journal.state import IDENTITY, identity, read_fingerprint
from rlzoo.measure.report import MARK
from rlzoo.support.atomic import remove_files
from rlzoo.support.lock import FILE as LOCK
from rlzoo.support.lock import Lock

OWN = re.compile(
    r"summary\.json|tracking/(record\.json|sent\.json|\.lock)|plugins/(.*/)?__pycache__/[^/]*\.pyc"
    r"|(superseded/[0-9]+/)?(metrics\.jsonl|rollouts/[0-9]+\.(jsonl|safetensors))"
    r"|evaluations/[0-9]+\.json|figures/(completions|completions/step-[0-9]+)\.html"
)
"""Paths in a run directory that only rlzoo and Python write. Seals identify checkpoints, and hashes identify plugin copies."""
PAGES = ("compare.html", "replay.html")


def run_at(path: Path) -> Path:
    """Return a run's directory with links and ``..`` resolved. Raise `UserError` if the path is a link or is not a run."""
    path = user_path(path)
    if not path.is_symlink() and not (path / IDENTITY).is_symlink():
        with suppress(UserError, OSError, ValueError, TypeError, KeyError):  # another program's run.json
            if re.fullmatch("[0-9a-f]{32}", identity(path)):
                return path.resolve()
    problem = "is a link; pass the folder itself" if path.is_symlink() else f"is not a run: it has no valid {IDENTITY}"
    raise UserError(f"{shown(str(path))} {problem}; `rlzoo runs list FOLDER` lists the runs in a folder")


def lock_run(path: Path, locks: ExitStack) -> Path:
    """Before a removal, lock a run and its upload to MLflow until ``locks`` is closed. Return the run's directory.

    Raises:
        UserError: the path is not a run, another process is writing to the run, or its directory contains another run.
    """
    run = run_at(path)
    try:
        for folder in (run, run / "tracking"):
            if folder.is_dir() and not folder.is_symlink():
                locks.callback(Lock(folder).release)
    except OSError as error:
        raise UserError(f"{str(run)!r} cannot be locked: {error}") from error
    if inner := [file.parent for file in run.rglob(IDENTITY) if file.parent != run]:
        raise UserError(f"{shown(str(path))} contains another run, {str(inner[0])!r}; remove that one first, or move it away")
    return run


def remove_run(run: Path) -> list[str]:
    """Remove empty folders and rlzoo's own files from a locked run directory, and return the names of what is kept.

    Links are neither followed nor removed. An interrupted removal can be repeated. ``config.yaml`` is removed first, so that
    no command mistakes the rest for a run. ``run.json`` is removed last, because it identifies the files of the run.

    Raises:
        UserError: a file cannot be removed.
    """
    facts, is_linked = read_fingerprint(run), any((run / name).is_symlink() for name in TIDIED)

    def is_own(name: str) -> bool:
        if name in PAGES:
            return MARK in (run / name).read_bytes()[:1000]
        if (copied := facts.get(f"plugin {name.removeprefix('plugins/')}")) and name.startswith("plugins/"):
            return bool(copied == hashlib.sha256((run / name).read_bytes()).hexdigest())
        return OWN.fullmatch(name) is not None

    try:
        remove_files(run, lambda name: name == "config.yaml")
        if not is_linked:
            tidy(run)
        for _, folder in [] if (run / "checkpoints").is_symlink() else own_checkpoints(run, LARGEST_STEP):
            if not folder.is_symlink():
                discard(folder, run)
        remove_files(run, is_own)
        for last in (LOCK, IDENTITY):
            remove_files(run, last.__eq__)
    except OSError as error:
        raise UserError(f"{str(run)!r} cannot be removed completely: {error}; fix this, and repeat the command") from error
    return sorted(path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_symlink() or not path.is_dir())
