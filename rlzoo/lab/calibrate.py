"""Finds the width at which a rule clips a target share of the responses, using short pilot runs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlzoo.config.run_config import RunConfig
from rlzoo.core.errors import UserError
from rlzoo.core.policy import ClipPolicy
from rlzoo.lab.recorded import RecordedRun
from rlzoo.lab.replay import clip_fraction, match_clip_fraction, widths_of
from rlzoo.support.parsing import dump_yaml
from rlzoo.training.after_step import Observer
from rlzoo.training.train import train

NEAR = 0.1  # maximum relative deviation at which a clip fraction counts as matching the target


@dataclass(frozen=True, slots=True)
class Pilot:
    """A pilot run and its result."""

    policy: ClipPolicy
    clip_fraction: float  # clip fraction across all updates
    target: float

    @property
    def is_met(self) -> bool:
        """Whether the clip fraction is within 10% of the target."""
        return abs(self.clip_fraction - self.target) <= NEAR * self.target


def calibrate(
    config: RunConfig,
    target: float,
    *,
    max_pilots: int,
    on_pilot: Callable[[Pilot], None],
    observer: Observer | None = None,
) -> Pilot:
    """Run pilots until one of them clips the target share of responses, and return the pilot that comes closest.

    Clipping changes the updates, and the updates change what is clipped. Each pilot therefore restarts from the same weights
    with the width that would have hit the target in the previous pilot.

    Args:
        config: configuration of the pilots. Evaluation, checkpoints and MLflow tracking are disabled.
        target: target share of clipped responses among all responses with a nonzero advantage, across all steps of a pilot.
        max_pilots: maximum number of pilots.
        on_pilot: called after each pilot.
        observer: called with the metrics of every step.

    Raises:
        UserError: the rule has no width, or no width reaches the target share.
    """
    if not config.clip.width_fields() and config.clip.targeting(target) is None:
        raise UserError(f"rule {config.clip.name!r} has no width to calibrate")
    pilots: list[Pilot] = []
    policy = config.clip.targeting(target) or config.clip  # an adaptive rule finds its widths by itself, in one pilot
    for _ in range(max_pilots):
        with tempfile.TemporaryDirectory(prefix="rlzoo-pilot-") as folder:
            run = RecordedRun.read(train(pilot_config(config, policy, Path(folder, "run")), observer).path, config.plugins)
        pilots.append(Pilot(policy, clip_fraction(run, policy), target))
        on_pilot(pilots[-1])
        if pilots[-1].is_met or policy.targeting(target) is not None:
            break
        policy = match_clip_fraction(run, policy, target)
    return min(pilots, key=lambda pilot: abs(pilot.clip_fraction - target))


def overlay(pilot: Pilot, config: RunConfig) -> str:
    """Format a config file with the calibrated widths and a comment that describes the pilot."""
    widths = {name: float(f"{value:.6g}") for name, value in widths_of(pilot.policy).items()}
    settings = pilot.policy.model_dump(mode="json", exclude_defaults=True) if pilot.policy.targeting(pilot.target) else widths
    return (
        f"# Clip fraction {pilot.clip_fraction:.1%} (target {pilot.target:.1%}) over {config.steps} steps of\n"
        f"# {config.task.name} with model {config.model.path}, learner.lr {config.learner.lr:g}, seed {config.seed}.\n"
        "# Found by rlzoo calibrate.\n" + dump_yaml({"clip": {"name": pilot.policy.name, **settings}})
    )


def pilot_config(config: RunConfig, policy: ClipPolicy, output: Path) -> RunConfig:
    """Return the configuration of a pilot with this rule, without evaluation, checkpoints or MLflow."""
    off = {"eval": {"num_problems": 0}, "checkpoint": {"every": 0}, "tracking": {"mlflow": False}}
    sections = {name: getattr(config, name).model_copy(update=settings) for name, settings in off.items()}
    return config.model_copy(update={**sections, "clip": policy, "output": output})
