"""What a run needs beside its weights to go on where a checkpoint left it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rlzoo.engine.manifest import damage
from rlzoo.errors import UserError, first_mistake
from rlzoo.types import Rollout

FILE = "state.json"

logger = logging.getLogger("rlzoo")


@dataclass(frozen=True, slots=True)
class RunState:
    """Where a run stood after a step.

    Example:
        ``RunState.read(checkpoint).step`` is the last step that is complete.
    """

    step: int
    num_optimizer_steps: int
    next_problem: int  # training problems sampled so far
    num_nonfinite: int  # updates in a row without a finite gradient, just before
    scheduler: dict[str, Any]
    ahead: list[Rollout] | None  # responses to the next step's problems, where they are sampled already
    alarms: dict[str, Any]
    data: str  # fingerprint of the training problems
    seconds: float  # the run has taken so far

    def write(self, folder: Path) -> None:
        """Write it into a checkpoint's folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_bytes(TypeAdapter(RunState).dump_json(self))

    @classmethod
    def read(cls, folder: Path) -> RunState:
        """Read it back.

        Raises:
            UserError: it is not what a run writes.
        """
        try:
            state = TypeAdapter(RunState).validate_json((folder / FILE).read_bytes())
        except (OSError, ValidationError) as error:
            what = first_mistake(error) if isinstance(error, ValidationError) else error.strerror
            raise UserError(f"{str(folder / FILE)!r} is not what a run writes: {what}") from error
        if min(state.step, state.num_optimizer_steps, state.next_problem) < 0:
            raise UserError(f"{str(folder / FILE)!r} is not what a run writes: a count is below 0")
        return state


def newest_state(run: Path) -> Path | None:
    """The folder of the newest whole checkpoint a run can go on from; damaged ones are named in a warning.

    Returns:
        None if the run was stopped before its first checkpoint.

    Raises:
        UserError: there is no run, or all of its checkpoints are damaged.
    """
    if not (run / "config.yaml").is_file():
        raise UserError(f"--resume: {str(run)!r} holds no run: it has no config.yaml")
    found = sorted(file.parent for file in run.glob(f"checkpoints/step-*/state/{FILE}"))
    for state in reversed(found):
        what = damage(state.parent)
        if what is None:
            return state
        logger.warning("checkpoint %s is damaged: %s; trying the one before", state.parent, what)
    if found:
        raise UserError(
            f"--resume: every checkpoint in {str(run / 'checkpoints')!r} is damaged; remove them to begin again with step 0"
        )
    return None
