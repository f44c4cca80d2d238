"""Measures how long a step of the default run spends outside sampling and learning, and how long the run takes to start."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import chain
from pathlib import Path
from typing import Any

from examples.bench.cases import CASES
from examples.bench.rlzoo_worker import make_run
from examples.bench.turns import Clock

STEPS = 12


def timed() -> dict[str, list[tuple[Any, str]]]:
    """Return the functions to time for each share, as pairs of a module or class and a function name."""
    from rlzoo.journal.run_directory import RunDirectory
    from rlzoo.journal.tracking.tracker import Tracker
    from rlzoo.learner import learner
    from rlzoo.measure.monitor import Monitor
    from rlzoo.training import loop

    return {
        "rule": [(learner, "judgement"), (learner, "updated")],
        "metrics": [(learner, "measure"), (loop, "step_metrics"), (Monitor, "after_step")],
        "journal": [(RunDirectory, "save_rollouts"), (RunDirectory, "log")],
        "mlflow": [(Tracker, "look")],
    }


def beside_the_model(case: str | None = None) -> dict[str, float]:
    """Return the median shares of a step's time that the rule, the measurements, the journal and MLflow take.

    A separate process sends metrics to MLflow. MLflow's share is the time that the run spends checking this process.

    Args:
        case: one of `CASES`; None for the default run.
    """
    from rlzoo import RunConfig
    from rlzoo.gate.enter import enter
    from rlzoo.journal.tracking.tracker import Tracker
    from rlzoo.training import loop
    from rlzoo.training.after_step import AfterStep
    from rlzoo.training.mlflow_run import upload_of
    from rlzoo.training.run import Run
    from rlzoo.training.stopping import StopRequest

    places = timed()
    clocks = {name: Clock() for name in places}
    for name, methods in places.items():
        for owner, method in methods:
            setattr(owner, method, clocks[name].around(getattr(owner, method)))
    folder = Path(tempfile.mkdtemp(prefix="rlzoo-bench-"))
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
    config = RunConfig.compose(clip="fspo", overrides=["eval.num_problems=0"], steps=STEPS, output=folder / "run")
    task = config.task.model_copy(update={"seed": 0})
    shares: dict[str, list[float]] = {name: [] for name in clocks}
    with task:
        models = Path(tempfile.gettempdir()) / "rlzoo-bench-models"
        run = Run(enter(config, task)) if case is None else make_run(CASES[case], models, "tracking.mlflow=true")
        with Tracker(is_on=True) as tracker:
            tracker.begin(run.directory.path, upload_of(run))
            taken = loop.steps(run)
            after = AfterStep(run, tracker, StopRequest())
            for _ in range(STEPS):
                started = time.perf_counter()
                after(*next(taken))
                seconds = time.perf_counter() - started
                for name, clock in clocks.items():
                    shares[name].append(clock.take() / seconds)
    for owner, method in chain.from_iterable(places.values()):
        setattr(owner, method, getattr(owner, method).__wrapped__)
    median = {name: statistics.median(values[2:]) for name, values in shares.items()}
    return {**median, "sum": sum(median.values())}


def seconds_to_the_first_step(repeats: int = 3) -> list[float]:
    """Return the seconds from the command to the start of the first step, including the time to create the MLflow store."""
    found = []
    for _ in range(repeats):
        folder = Path(tempfile.mkdtemp(prefix="rlzoo-bench-"))
        command = [sys.executable, "-m", "rlzoo", "train", "--clip", "fspo", "--steps", "1", "--output", str(folder / "run")]
        environment = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db", "HF_HUB_OFFLINE": "1"}
        started = time.perf_counter()
        quiet = subprocess.DEVNULL
        settings = ["--set", "eval.num_problems=0"]
        with subprocess.Popen([*command, *settings], env=environment, stdout=quiet, stderr=quiet) as process:
            while not (folder / "run" / "metrics.jsonl").exists() and process.poll() is None:
                time.sleep(0.01)
            found.append(time.perf_counter() - started)
    return found
