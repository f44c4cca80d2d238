"""The state that a checkpoint holds besides weights and optimizer, and how the newest checkpoint is found."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, TypeAdapter, ValidationError

from rlzoo.errors import UserError, first_mistake
from rlzoo.journal.manifest import damage
from rlzoo.support.parsing import parse_json
from rlzoo.types import Rollout

FILE = "state.json"
IDENTITY = "run.json"
NAME = re.compile(r"step-[0-9]{6,9}")

logger = logging.getLogger("rlzoo")


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run after a step."""

    step: NonNegativeInt
    num_optimizer_steps: NonNegativeInt
    next_problem: NonNegativeInt  # training problems sampled so far
    num_nonfinite: NonNegativeInt  # updates in a row without a finite gradient, just before
    scheduler: dict[str, Any]
    ahead: list[Rollout] | None  # responses to the next step's problems, where they are sampled already
    alarms: dict[str, Any]
    data: str  # fingerprint of the training problems
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]  # the run has taken so far
    run: str  # identity of the run
    periodic: bool = True  # False: saved because the run was stopped, or at its end

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
        for rollout in state.ahead or ():
            is_matched = len(rollout.response_ids) == len(rollout.rollout_log_probs) > -bool(rollout.failure)
            is_matched &= (
                all(0 <= start < end <= len(rollout.response_ids) for start, end in rollout.spans) or not rollout.turns
            )
            is_positive = min(*rollout.prompt_ids, *rollout.response_ids, rollout.policy_version, 0) == 0
            if not is_matched or not is_positive or rollout.policy_version > state.num_optimizer_steps:
                raise UserError(f"{str(folder / FILE)!r} is not what a run writes: a response that was sampled ahead")
        return state


def identity(run: Path) -> str:
    """The random name that a run directory was given when it was made.

    Raises:
        UserError: the file with it is missing or damaged.
    """
    file = run / IDENTITY
    try:
        found = parse_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{str(file)!r} is missing; put it back as it was") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{str(file)!r} cannot be read: {error}; put it back as it was") from error
    if not isinstance(found, dict) or not isinstance(found.get("id"), str):
        raise UserError(f"{str(file)!r} is not what a run writes; put it back as it was")
    return str(found["id"])


def numbered(run: Path) -> list[tuple[int, Path]]:
    """The folders in ``checkpoints/`` with names that a run gives, and their steps, in order; others are no checkpoints."""
    folder = run / "checkpoints"
    found = list(folder.iterdir()) if folder.is_dir() else []
    steps = [(int(path.name[5:]), path) for path in found if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted((step, path) for step, path in steps if path.name == f"step-{step:06d}")


def newest_state(run: Path) -> Path | None:
    """The state in the newest whole checkpoint of a run; damaged checkpoints are named in a warning.

    Returns:
        None if the run was stopped before its first step, so that there is nothing to lose.

    Raises:
        UserError: there is no run, none of its checkpoints is whole, they are gone, or the newest is of another run.
    """
    if not (run / "config.yaml").is_file():
        raise UserError(f"--resume: {str(run)!r} holds no run: it has no config.yaml")
    damaged, own = "", identity(run)
    found = [(step, folder) for step, folder in numbered(run) if (folder / "state" / FILE).exists()]
    for step, folder in reversed(found):
        what = damage(folder)
        if what is None:
            state = RunState.read(folder / "state")
            if state.step != step:  # it was put there by hand
                holds = f"is named after step {step} and holds step {state.step}"
                raise UserError(f"--resume: {str(folder)!r} {holds}; move it away")
            if state.run != own:
                raise UserError(f"--resume: {str(folder)!r} is a checkpoint of another run; move it away")
            return folder / "state"
        damaged = damaged or f"; {folder.name}: {what}"
        logger.warning("checkpoint %s is damaged: %s; trying the one before", folder, what)
    if damaged:
        raise UserError(
            f"--resume: every checkpoint in {str(run / 'checkpoints')!r} is damaged{damaged}; nothing was changed; "
            "put one back as it was, or start another run with another --output"
        )
    last = _last_step(run)
    if numbered(run) or last > 0:
        raise UserError(
            f"--resume: {str(run)!r} has steps up to {last}, and no checkpoint to resume from in its checkpoints/; "
            "nothing was changed; put a checkpoint back, or start another run with another --output"
        )
    return None


def _last_step(run: Path) -> int:
    """The last step with a row of metrics or with recorded rollouts; 0 before the first."""
    file = run / "metrics.jsonl"
    lines = file.read_bytes().count(b"\n") - 1 if file.is_file() else 0  # the first is that of step 0
    stems = [file.stem for file in (run / "rollouts").glob("[0-9]*.safetensors")]
    steps = [int(stem) for stem in stems if stem.isascii() and stem.isdecimal() and len(stem) < 10]
    return max([0, lines, *steps])
