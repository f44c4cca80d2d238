"""Calibration: short pilot runs that find the width with which a policy clips a wanted share of the responses."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from rlzoo.config.run_config import RunConfig
from rlzoo.errors import UserError
from rlzoo.lab.recorded import RecordedRun
from rlzoo.lab.replay import clip_fraction_of, match_clip_fraction
from rlzoo.policy import ClipPolicy
from rlzoo.training.after_step import Observer
from rlzoo.training.train import train

NEAR = 0.1  # a clip fraction within this share of the target is met


@dataclass(frozen=True, slots=True)
class Pilot:
    """One pilot run.

    Example:
        ``Pilot(policy, clip_fraction=0.31)`` clipped three times too much: the next one is wider.
    """

    policy: ClipPolicy
    clip_fraction: float  # over all its updates


def calibrate(
    config: RunConfig, target: float, *, max_pilots: int, told: Callable[[Pilot], None], observer: Observer | None = None
) -> list[Pilot]:
    """Run pilots until one clips the wanted share.

    What a policy clips decides how the model moves, and that what it clips: so the width that would have clipped the target
    in one pilot is tried in the next one, from the same start.

    Args:
        config: the pilot: its steps are run, without evaluation and without MLflow.
        target: wanted share of the responses with non-zero advantage, over all steps of the pilot.
        max_pilots: how many to run at most.
        told: called after each pilot.
        observer: told every step's metrics.

    Returns:
        The pilots, in order; the nearest to the target is the answer, and `is_met` says whether it is near enough.

    Raises:
        UserError: the policy has no width, or none gives that share.
    """
    if not config.clip.width_fields() and config.clip.targeting(target) is None:
        raise UserError(f"clip policy {config.clip.name!r} has no width to calibrate")
    pilots: list[Pilot] = []
    policy = config.clip
    for number in range(max_pilots):
        with tempfile.TemporaryDirectory(prefix="rlzoo-pilot-") as folder:
            run = RecordedRun.read(train(_pilot(config, policy, Path(folder) / str(number)), observer).path)
        fraction = clip_fraction_of(run)
        pilots.append(Pilot(policy, fraction(policy)))
        told(pilots[-1])
        if is_met(pilots[-1], target):
            break
        policy = match_clip_fraction(policy, target, fraction)
    return pilots


def is_met(pilot: Pilot, target: float) -> bool:
    """Whether a pilot's clip fraction is within a tenth of the target."""
    return abs(pilot.clip_fraction - target) <= NEAR * target


def nearest(pilots: list[Pilot], target: float) -> Pilot:
    """The pilot whose clip fraction comes closest."""
    return min(pilots, key=lambda pilot: abs(pilot.clip_fraction - target))


def overlay(pilot: Pilot, target: float, config: RunConfig) -> str:
    """A config file with the widths found, and what they were found for."""
    policy, told = pilot.policy, pilot.policy.targeting(target)
    if told is not None:
        usual = {name: field.get_default(call_default_factory=True) for name, field in type(policy).model_fields.items()}
        changed = {name for name, value in told.model_dump().items() if value != usual[name]}
        found = told.model_dump(mode="json", include=changed)
    else:
        widths = {name: getattr(policy, name) for name in policy.width_fields()}
        found = {name: float(f"{value:.6g}") for name, value in widths.items() if value is not None}
    lines = (
        f"# Clips {pilot.clip_fraction:.1%} of the responses (wanted {target:.1%}) over {config.steps} steps of",
        f"# {config.task.name} with model {config.model.path}, learner.lr {config.learner.lr:g}, seed {config.seed}.",
        "# Found by rlzoo calibrate.",
        yaml.safe_dump({"clip": {"name": policy.name, **found}}, sort_keys=False),
    )
    return "\n".join(lines)


def _pilot(config: RunConfig, policy: ClipPolicy, output: Path) -> RunConfig:
    """The same run with another width, that leaves nothing behind but its recording."""
    return config.model_copy(
        update={
            "clip": policy,
            "output": output,
            "eval": config.eval.model_copy(update={"num_problems": 0}),
            "checkpoint": config.checkpoint.model_copy(update={"every": 0, "keep_for_replay": 0}),
            "tracking": config.tracking.model_copy(update={"mlflow": False}),
        }
    )
