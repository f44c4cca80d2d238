"""Trains a model from a configuration. This is the implementation of ``rlzoo train`` and `rlzoo.train`."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from rlzoo.config.run_config import RunConfig
from rlzoo.core.errors import PolicyError, RunError, UserError, shown
from rlzoo.gate.enter import enter
from rlzoo.gate.settings import remarks
from rlzoo.journal.run_directory import read_metrics
from rlzoo.journal.tracking.tracker import Tracker
from rlzoo.measure.profile import LengthProfile
from rlzoo.models.watch import watched_ranks
from rlzoo.support.atomic import UnwritableError
from rlzoo.tasks.task import seeded
from rlzoo.training.after_step import AfterStep, Observer, Stage
from rlzoo.training.loop import steps
from rlzoo.training.metrics import run_metrics
from rlzoo.training.mlflow_run import upload_of
from rlzoo.training.run import Run
from rlzoo.training.stopping import StopRequest, requested_stop

logger = logging.getLogger("rlzoo")

SPEED = "throughput/tokens_per_second"


@dataclass(frozen=True)
class RunResult:
    """The outcome of a run."""

    path: Path  # the run directory
    profile: LengthProfile | None = field(repr=False)  # clipping by response length over the last steps
    mlflow_run_id: str | None = None  # None without tracking or if the store could not be reached

    @cached_property
    def metrics(self) -> list[dict[str, float]]:
        """The number and the metrics of each step, from step 0. They are read from the run directory on first use."""
        return read_metrics(self.path / "metrics.jsonl")

    def to_pandas(self) -> Any:
        """Return `metrics` as a pandas data frame with one row per step."""
        import pandas as pd  # imported here because it takes a second; MLflow requires pandas

        return pd.DataFrame(self.metrics)


def train(
    config: RunConfig,
    observer: Observer | None = None,
    *,
    resume: bool = False,
    allow_changed: bool = False,
    stage: Stage | None = None,
) -> RunResult:
    """Train a model, as ``rlzoo train`` does.

    The first Ctrl-C or SIGTERM ends the run after the current step and saves it. The second ends the run immediately.

    Args:
        config: the configuration of the run.
        observer: called with the metrics of each step, for progress displays.
        resume: resume from the newest checkpoint in ``config.output``.
        stage: called before work outside the training steps, such as an evaluation, for progress displays.
        allow_changed: with ``resume``, log a warning instead of raising an error if something that affects the run's numbers
            has changed since the run was started.

    Raises:
        UserError: the run cannot start with this configuration. Nothing has been written.
        RunError: the run cannot continue.
        KeyboardInterrupt: Ctrl-C was pressed.
        SystemExit: SIGTERM arrived; the code is 143.
    """
    if not hasattr(config, "task"):
        raise UserError(f"train({shown(config)}): expected a configuration, such as RunConfig.compose(clip=NAME)")
    task = seeded(config.task, config.seed)
    is_main = os.environ.get("RANK", "0") == "0"
    try:
        with watched_ranks(), task, ExitStack() as last, Tracker(config.tracking.mlflow and is_main) as tracker:
            if stage is not None and is_main:
                stage(f"loading {config.model.path}")
            run = Run(enter(config, task, resume=resume, allow_changed=allow_changed))
            last.callback(run.directory.close)
            tracker.begin(run.directory.path, upload_of(run))
            with requested_stop() as stop:
                result = _run(run, tracker, stop, observer, stage)
    except UnwritableError as error:
        raise RunError(f"{error}; once that is fixed, run the same command again") from error
    return replace(result, mlflow_run_id=tracker.run_id)


def _run(run: Run, tracker: Tracker, stop: StopRequest, observer: Observer | None, stage: Stage | None) -> RunResult:
    """Run all steps. A failed run keeps its last checkpoint and is also saved if the failed step made no update."""
    config, after = run.config, AfterStep(run, tracker, stop, observer, stage)
    run.directory.summarise(run.summary(finished=False))
    for level, line in remarks(config):
        logger.log(level, line)
    try:
        if not run.recent:
            after(0, {})
        for step, row, updates in steps(run):
            after(step, row, updates)
    except (PolicyError, RunError) as error:
        error.add_note(f"step {run.attempted} (everything so far is in {run.directory.path})")
        raise
    except UnwritableError as error:
        raise RunError(f"step {run.attempted}: {error}; once that is fixed, resume with: {run.how_to_resume}") from error
    finally:
        run.leave()
    profile = run.monitor.profile()
    totals = run_metrics(list(run.accuracies.values()), run.recent, profile)
    seconds = {"seconds": round(run.seconds, 3)}
    run.directory.summarise({**run.summary(finished=True), **seconds, "metrics": totals})
    speeds = [row[SPEED] for row in run.recent if SPEED in row]
    speed = {"tokens_per_second": round(fmean(speeds))} if speeds else {}  # not in the summary, which must be reproducible
    tracker.conclude(config.steps, totals | speed, {"warnings": ", ".join(run.monitor.raised)})
    return RunResult(run.directory.path, profile)
