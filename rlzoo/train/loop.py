"""The training loop: sample, grade, learn, measure, repeat."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError

from rlzoo.measure.profile import LengthProfile
from rlzoo.config.run_config import RunConfig
from rlzoo.train.checks import check_plugins_unchanged, check_run
from rlzoo.train.metrics import aggregate_metrics
from rlzoo.measure.monitor import WINDOW
from rlzoo.train.run import Run
from rlzoo.journal.run_directory import why_not_written
from rlzoo.train.tags import run_record
from rlzoo.errors import PolicyError, RunError
from rlzoo.support.garbage import quick_garbage_collection
from rlzoo.support.signals import StopRequest, requested_stop
from rlzoo.journal.tracking.tracker import Tracker
from rlzoo.fast_cpu.waiting import waiting_by_load

logger = logging.getLogger("rlzoo")

Observer = Callable[[int, Mapping[str, float]], None]
"""Called with the step and its metrics after each step, and with step 0 after the first evaluation."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run came to.

    Example:
        ``result.metrics[-1]["reward/mean"]``
    """

    path: Path  # the run directory
    metrics: list[dict[str, float]]  # one dict per step, first that of step 0
    profile: LengthProfile | None  # of the clip by length, over the last steps
    mlflow_run_id: str | None = None  # if the store could be reached


def train(
    config: RunConfig, observer: Observer | None = None, *, resume: bool = False, allow_changed_plugin: bool = False
) -> RunResult:
    """Train a model as the configuration says; what ``rlzoo train`` does.

    Ctrl-C or SIGTERM end the run after the step that is under way, once it is saved; a second one at once.

    Args:
        config: the complete run.
        observer: told every step's metrics, for progress displays.
        resume: resume from the newest checkpoint in ``config.output``.
        allow_changed_plugin: resume also where a plugin is not what the run was started with, after a warning.

    Raises:
        UserError: the run cannot start as configured; nothing has been written then.
        RunError: it cannot go on.
        KeyboardInterrupt: Ctrl-C.
        SystemExit: SIGTERM, code 143.
    """
    check_run(config, resume=resume)
    if resume and config.output is not None:
        check_plugins_unchanged(config, allowed=allow_changed_plugin)
    task = config.task if config.task.seed is not None else config.task.model_copy(update={"seed": config.seed})
    is_main = os.environ.get("RANK", "0") == "0"
    try:
        with task, ExitStack() as last, Tracker(config.tracking.mlflow and is_main) as tracker:
            run = Run(config, task, resume=resume)
            last.callback(run.directory.close)
            tracker.begin(run.directory.path, run_record(run))
            # on other devices, operations have no threads that wait for each other
            threads = torch.get_num_threads() if run.accelerator.device.type == "cpu" else 1
            with requested_stop() as stop, quick_garbage_collection(), waiting_by_load(threads):
                result = run_steps(run, tracker, stop, observer)
    except (OSError, SafetensorError) as error:
        reason = why_not_written(error)
        if reason is None:
            raise
        raise RunError(f"{reason}; once that is fixed, run the same command again") from error
    return replace(result, mlflow_run_id=tracker.run_id)


def run_steps(run: Run, tracker: Tracker, stop: StopRequest, observer: Observer | None) -> RunResult:
    """Run every step; a run that fails leaves its last checkpoint, and if it can the weights it failed with."""
    config = run.config
    run.directory.summarise(run.summary(finished=False))
    _warn_of_an_inert_clip(config)
    step = first = run.done + 1 if run.metrics else 0
    try:
        for step in range(first, config.steps + 1):
            metrics = run.step(step) if step else run.evaluate()
            run.report(step, metrics)
            tracker.look()
            if observer is not None and run.is_main:
                observer(step, metrics)
            run.complete(step)
            is_stopping = run.is_any(stop.signal is not None)
            # with the checkpoint of step 0, a run that has steps can always be resumed
            if run.is_due(step, config.checkpoint.every) or step in (0, config.steps) or is_stopping:
                run.save(step)
            if run.is_due(step, config.tracking.figure_every) or step == config.steps:
                run.draw(step, wanted=tracker.is_on)
            if is_stopping and step < config.steps:
                stop.end(f"stopped after step {step} of {config.steps}; go on with: {run.how_to_resume}")
    except (PolicyError, RunError) as error:
        error.add_note(f"step {step}, everything so far in {run.directory.path}")
        raise
    except (OSError, SafetensorError) as error:
        reason = why_not_written(error)
        if reason is None:
            raise
        raise RunError(f"step {step}: {reason}; once that is fixed, resume with: {run.how_to_resume}") from error
    finally:
        run.leave(step)
    profile = run.monitor.profile()
    aggregates = aggregate_metrics(run.metrics, profile, WINDOW)
    seconds = {"seconds": round(run.seconds, 3)}
    run.directory.summarise({**run.summary(finished=True), **seconds, "metrics": aggregates})
    tracker.conclude(config.steps, aggregates, {"warnings": ", ".join(run.monitor.alarms.raised)})
    return RunResult(run.directory.path, run.metrics, profile)


def _warn_of_an_inert_clip(config: RunConfig) -> None:
    if config.learner.num_minibatches * config.learner.num_epochs == 1:
        logger.warning(
            "clip is inert: one update per rollout, so every ratio is 1; "
            "raise learner.num_minibatches or learner.num_epochs for a clip to act"
        )
