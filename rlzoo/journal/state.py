"""Stores the training state (except the weights and the optimizer) in a checkpoint, and finds the newest checkpoint."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, TypeAdapter, ValidationError

from rlzoo.core.errors import UserError, first_mistake
from rlzoo.journal.manifest import damage
from rlzoo.rollout.curriculum import Measured
from rlzoo.rollout.types import QueuedBatch
from rlzoo.support.reading import remedy

FILE = "state.json"
IDENTITY = "run.json"
NAME = re.compile(r"step-[0-9]{6,9}")

logger = logging.getLogger("rlzoo")


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run after a step, except for the weights and the optimizer."""

    step: NonNegativeInt
    num_optimizer_steps: NonNegativeInt
    next_problem: NonNegativeInt  # index of the next training problem
    num_nonfinite: NonNegativeInt  # number of consecutive updates, ending with the latest, whose gradient was not finite
    alarms: dict[str, Any]
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]  # training time so far
    run: str  # ID of the run
    periodic: bool  # False if the checkpoint was saved because the run was stopped or had ended
    queue: list[QueuedBatch] = field(default_factory=list)  # batches that were sampled ahead for the next steps
    measured: Measured = field(default_factory=dict)  # empty without rollout.band
    critic_nonfinite: NonNegativeInt = 0  # like num_nonfinite, for the critic

    def write(self, folder: Path) -> None:
        """Write the state to a folder in a checkpoint."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_bytes(TypeAdapter(RunState).dump_json(self))

    @classmethod
    def read(cls, folder: Path) -> RunState:
        """Read the state from a folder in a checkpoint.

        Raises:
            UserError: the file is missing or invalid.
        """
        try:
            state = TypeAdapter(RunState).validate_json((folder / FILE).read_bytes())
        except (OSError, ValidationError) as error:
            raise UserError(f"{str(folder / FILE)!r} is not a valid run state: {first_mistake(error)}") from error
        return state


def identity(run: Path) -> str:
    """Return the random ID of a run, which is set when its directory is created.

    Raises:
        UserError: ``run.json`` is missing or damaged.
    """
    return str(_run_facts(run)["id"])


def read_fingerprint(run: Path) -> dict[str, Any]:
    """Return the facts that determined a run's results when it was started; see `rlzoo.gate.fingerprint`.

    Raises:
        UserError: ``run.json`` is missing or damaged.
    """
    return dict(_run_facts(run)["fingerprint"])


def _run_facts(run: Path) -> dict[str, Any]:
    """Return the ID and the fingerprint of a run."""
    file = run / IDENTITY
    try:
        facts: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{str(file)!r} is missing; restore it") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{str(file)!r} cannot be read: {error}; {remedy(error, 'restore it')}") from error
    return facts


def numbered(run: Path) -> list[tuple[int, Path]]:
    """Return the steps and folders of the checkpoints, sorted by step. Folders that are not named after a step are ignored."""
    folders = [path for path in (run / "checkpoints").glob("step-*") if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted((int(folder.name.removeprefix("step-")), folder) for folder in folders)


def newest_state(run: Path) -> Path | None:
    """Find the state in the newest intact checkpoint of a run, and log a warning for each damaged checkpoint.

    Returns:
        The folder of the state, or None if the run was stopped before its first checkpoint and must start over.

    Raises:
        UserError: all checkpoints are missing or damaged, or the newest checkpoint belongs to another run.
    """
    damaged = ""
    for _, folder in reversed(numbered(run)):
        if not (folder / "state" / FILE).exists():
            continue  # the user kept only the weights
        what = damage(folder)
        if what is None:
            if RunState.read(folder / "state").run != identity(run):
                raise UserError(f"--resume: {str(folder)!r} is a checkpoint of another run; move it away")
            return folder / "state"
        damaged = damaged or f"; {folder.name}: {what}"
        logger.warning("checkpoint %s is damaged: %s; trying the previous one", folder, what)
    if damaged:
        raise UserError(
            f"--resume: every checkpoint in {str(run / 'checkpoints')!r} is damaged{damaged}; nothing was changed; "
            "restore a checkpoint, or start another run with another --output"
        )
    last = _last_step(run)
    if numbered(run) or last > 0:
        raise UserError(
            f"--resume: {str(run)!r} has steps up to {last}, but its checkpoints/ has no checkpoint to resume from; "
            "nothing was changed; restore a checkpoint, or start another run with another --output"
        )
    return None


def _last_step(run: Path) -> int:
    """Return the last step with metrics or recorded rollouts, or 0 if there is none."""
    file = run / "metrics.jsonl"
    lines = file.read_bytes().count(b"\n") - 1 if file.is_file() else 0  # the first line is step 0
    return max(lines, *(int(file.stem) for file in (run / "rollouts").glob("[0-9]*.safetensors") if file.stem.isdecimal()), 0)
