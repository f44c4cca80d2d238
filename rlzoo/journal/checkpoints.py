"""Rotates checkpoints, and cleans up after a process that was killed while writing or removing one.

`RunDirectory.begin_checkpoint` writes a checkpoint under a temporary name, and `finish_checkpoint` renames it. Only
checkpoints with the ID of this run are removed, and only their sealed files.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path

from rlzoo.core.errors import UserError
from rlzoo.journal.manifest import remove_sealed, sealed_files
from rlzoo.journal.state import FILE, RunState, identity, numbered
from rlzoo.support.atomic import UNFINISHED_TENSORS, is_tensors, remove_files, temporary_path

STATE = f"state/{FILE}"
STOPPED = "stopped.json"
DISCARDED = "-discarded"
FILES = re.compile(
    r"""
    clip\.json | stopped\.json | manifest\.json | state/(state|policy)\.json | state/(monitor|optimizer)\.safetensors
    | config\.json | generation_config\.json | model(-[0-9]{5}-of-[0-9]{5})?\.safetensors(\.index\.json)?
    | (tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab)\.json | merges\.txt | vocab\.txt
    | (tokenizer|spiece|sentencepiece\.bpe)\.model | chat_template\.jinja | additional_chat_templates/\w+\.jinja
    | adapter/(adapter_config\.json | adapter_model\.safetensors | generation_config\.json | README\.md)
    | state/(latest | zero_to_fp32\.py | zero_to_torch\.py | deepspeed/\w+_states\.pt)
    | state/fsdp/shard-[0-9]{5}-model-00001-of-00001\.safetensors
    | (adapter/ | state/)?"""
    + UNFINISHED_TENSORS.pattern,
    re.VERBOSE,
)
"""Relative paths of files that rlzoo, transformers, PEFT, DeepSpeed, torch or safetensors may write to a checkpoint."""

logger = logging.getLogger("rlzoo")


def own_state(folder: Path, run: Path) -> RunState | None:
    """Return the state of a complete checkpoint of this run; None for any other folder."""
    try:
        if folder.is_symlink() or STATE not in sealed_files(folder):
            return None
        state = RunState.read(folder / "state")
        is_own = state.run == identity(run) and folder.name == f"step-{state.step:06d}"
    except (OSError, ValueError, TypeError):
        return None
    return state if is_own else None


def own_checkpoints(run: Path, until: int) -> list[tuple[RunState, Path]]:
    """Return the complete checkpoints of this run up to the given step, sorted by step."""
    found = [(own_state(folder, run), folder) for step, folder in numbered(run) if step <= until]
    return [(state, folder) for state, folder in found if state is not None]


def rotate(run: Path, newest: int, keep: int, scores: Mapping[int, float]) -> None:
    """Remove old checkpoints, except the last ``keep``, the last periodic checkpoint and the checkpoint with the best score.

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
    """Remove the files that rlzoo wrote into a checkpoint, and the folder if it is then empty.

    The folder is renamed first, so that no partial checkpoint keeps its name if the process is killed; `tidy` then removes
    the remaining files.
    """
    doomed = temporary_path(folder.with_name(folder.name + DISCARDED), identity(run))
    if os.path.lexists(doomed):
        set_aside(doomed, folder.name)
    folder.rename(doomed)
    _remove_discarded(doomed, folder)


def _remove_discarded(doomed: Path, folder: Path) -> None:
    """Remove the sealed files, and restore the folder's original name if it contains other files."""
    if doomed.is_dir() and not doomed.is_symlink():
        remove_sealed(doomed)
    if os.path.lexists(folder) and os.path.lexists(doomed):
        set_aside(doomed, folder.name)
    elif os.path.lexists(doomed):
        doomed.rename(folder)


def put_in_place(temporary: Path, folder: Path, run: Path) -> None:
    """Give a complete checkpoint its final name.

    An older checkpoint of this run with that name is removed: either it is damaged, so the run was resumed from an earlier
    checkpoint, or it contains weights from the middle of a step. Anything else with that name is renamed.
    """
    if own_state(folder, run) is not None or _is_own_stop(folder, run):
        discard(folder, run)
    if os.path.lexists(folder):
        set_aside(folder)
    temporary.replace(folder)


def tidy(run: Path) -> None:
    """Remove temporary and partially removed files and checkpoints that killed processes of this run left behind.

    Only paths whose names contain the ID of this run are removed, so the user's files may have any other name.
    """
    key = identity(run)
    deep = [path for name in ("figures", "superseded") for path in (run / name).rglob("*") if path.is_dir()]
    for folder in (run, *(run / name for name in ("checkpoints", "rollouts", "replay", "figures")), *deep):
        for path in sorted(folder.glob(".*.part")):
            name = path.name.removeprefix(".").removesuffix(".part").rpartition(".")[0]
            if path != temporary_path(folder / name, key):
                continue
            if folder.name == "checkpoints" and name.endswith(DISCARDED):
                _remove_discarded(path, folder / name.removesuffix(DISCARDED))
            else:
                remove_unfinished(path, name)


def remove_unfinished(path: Path, name: str) -> None:
    """Remove an unfinished file or folder. A folder that contains other files is renamed instead."""
    is_checkpoint = path.parent.name == "checkpoints"
    if path.is_dir() and not path.is_symlink():
        remove_files(path, lambda file: FILES.fullmatch(file) if is_checkpoint else is_tensors(file, name))
    elif path.is_file() and not path.is_symlink() and not is_checkpoint:
        path.unlink()
    if os.path.lexists(path):
        set_aside(path, name)


def forget_older_stops(run: Path, newest: Path) -> None:
    """Remove the weights that this run saved in the middle of earlier steps."""
    for folder in sorted((run / "checkpoints").glob("stopped-step-*")):
        if folder != newest and _is_own_stop(folder, run):
            discard(folder, run)


def set_aside(path: Path, name: str = "") -> None:
    """Rename a path that rlzoo did not write, to free its name; the new name starts with ``name``, by default the old name."""
    others = (path.with_name(f"{name or path.name}.aside-{number}") for number in itertools.count(1))
    other = next(other for other in others if not os.path.lexists(other))
    path.rename(other)
    logger.warning("%s is damaged, or contains files that this run did not write; it was renamed to %s", path, other.name)


def _is_own_stop(folder: Path, run: Path) -> bool:
    """Whether a folder contains weights that this run saved in the middle of a step."""
    try:
        is_stop = not folder.is_symlink() and STOPPED in sealed_files(folder)
        return is_stop and json.loads((folder / STOPPED).read_text(encoding="utf-8"))["run"] == identity(run)
    except (OSError, ValueError, LookupError, TypeError, UserError):
        return False
