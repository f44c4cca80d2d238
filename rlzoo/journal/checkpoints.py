"""Rotates checkpoints and cleans up after a process that was killed while writing or removing one.

`RunDirectory.checkpoint` writes a checkpoint under a temporary name and renames it when it is complete. Only checkpoints
with the ID of this run are removed. Of these, only the sealed files are removed, so files added by a user are kept.
"""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

from rlzoo.core.errors import UserError
from rlzoo.journal.manifest import remove_sealed
from rlzoo.journal.state import RunState, identity, numbered
from rlzoo.support.atomic import temporary_path

DISCARDED = "-discarded"
TIDIED = ("checkpoints", "rollouts", "evaluations", "figures", "superseded")  # folders that may contain temporary files

logger = logging.getLogger("rlzoo")


def own_state(folder: Path, run: Path) -> RunState | None:
    """Return the state of a checkpoint of this run, or None for any other folder."""
    try:
        state = RunState.read(folder / "state")
    except UserError:
        return None
    return state if state.run == identity(run) and folder.name == f"step-{state.step:06d}" else None


def own_checkpoints(run: Path, until: int) -> list[tuple[RunState, Path]]:
    """Return the checkpoints of this run up to the given step, sorted by step."""
    states = [(own_state(folder, run), folder) for step, folder in numbered(run) if step <= until]
    return [(state, folder) for state, folder in states if state is not None]


def rotate(run: Path, newest: int, keep: int, scores: Mapping[int, float]) -> None:
    """Remove old checkpoints except the last ``keep``, the last periodic checkpoint and the checkpoint with the best score.

    A checkpoint that was saved because the run was stopped is kept until a newer checkpoint exists.
    """
    saved = own_checkpoints(run, newest)
    periodic = [state.step for state, _ in saved if state.periodic]
    regular = sorted({*periodic, newest})
    scored = [state.step for state, _ in saved if state.step in scores]
    best = max(scored, key=lambda step: (scores[step], step), default=newest)
    kept = {*regular[-keep:], *periodic[-1:], newest, best}
    for state, folder in saved:
        if state.step not in kept:
            discard(folder, run)


def discard(folder: Path, run: Path) -> None:
    """Remove the files that rlzoo wrote into a checkpoint. If the folder is then empty, remove it too.

    The folder is renamed first so that, if the process is killed, no partial checkpoint is left under the original name. In
    that case, `tidy` removes the remaining files.
    """
    doomed = temporary_path(folder.with_name(folder.name + DISCARDED), identity(run))
    folder.rename(doomed)
    _remove_discarded(doomed, folder)


def _remove_discarded(doomed: Path, folder: Path) -> None:
    """Remove the sealed files. If the folder contains other files, restore its original name."""
    remove_sealed(doomed)
    if doomed.exists():
        doomed.rename(folder)


def put_in_place(temporary: Path, folder: Path, run: Path) -> None:
    """Give a complete checkpoint its final name.

    If a checkpoint of this run already has that name, it must be damaged, because the run was resumed from an earlier
    checkpoint. The damaged checkpoint is removed. Anything else with that name is renamed.
    """
    if own_state(folder, run) is not None:
        discard(folder, run)
    if folder.exists():
        others = (folder.with_name(f"{folder.name}.aside-{number}") for number in itertools.count(1))
        other = next(other for other in others if not other.exists())
        folder.rename(other)
        logger.warning("%s is damaged, or holds files that this run did not write; it was renamed to %s", folder, other.name)
    temporary.replace(folder)


def tidy(run: Path) -> None:
    """Remove temporary files and folders left by killed processes. Only names that contain the ID of this run are removed."""
    pattern = temporary_path(run / "*", identity(run)).name
    for path in [*run.glob(pattern), *(path for name in TIDIED for path in (run / name).rglob(pattern))]:
        name = path.name.removeprefix(".").removesuffix(".part").rpartition(".")[0]
        if name.endswith(DISCARDED):
            _remove_discarded(path, path.with_name(name.removesuffix(DISCARDED)))
        elif path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
