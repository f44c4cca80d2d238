"""rlzoo's part of a case, as ``rlzoo train --clip grpo`` runs it."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.bench import turns
from examples.bench.cases import GROUP, Case, find
from rlzoo import RunConfig
from rlzoo.gate.enter import enter
from rlzoo.tasks.problem import Problem
from rlzoo.tasks.task import Task
from rlzoo.training.loop import steps
from rlzoo.training.run import Run


class BenchTask(Task):
    """A task with the case's prompts, in which every second response is right."""

    case: str

    @property
    def name(self) -> str:
        """Return the name of the task."""
        return "bench"

    def train_problems(self, start: int, count: int) -> list[Problem]:
        """See `Task.train_problems`."""
        return [Problem(find(self.case).prompt(index), "") for index in range(start, start + count)]

    def held_out_problems(self, count: int) -> list[Problem]:
        """Return no problems."""
        return []

    def _grade(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[float]:
        return [float(index % 2) for index in range(len(responses))]


def make_run(case: Case, folder: Path, *overrides: str) -> Run:
    """Create a run of the case, ready for its first step."""
    settings = [
        f"model.path={case.model(folder)}",
        f"rollout.num_prompts={case.num_prompts}",
        f"rollout.group_size={GROUP}",
        f"rollout.max_new_tokens={case.max_new_tokens}",
        f"learner.num_minibatches={case.updates}",
        f"learner.autocast={case.autocast}",
        "learner.lr=1e-6",
        "learner.max_grad_norm=1.0",
        "eval.num_problems=0",
        "tracking.mlflow=false",
        *case.settings,
        *overrides,
    ]
    output = Path(tempfile.mkdtemp(prefix="rlzoo-bench-")) / "run"
    config = RunConfig.compose(clip="grpo", overrides=settings, task=BenchTask(case=case.name), steps=100_000, output=output)
    return Run(enter(config, config.task))


def main(name: str, folder: str, *overrides: str) -> None:
    """Run one step per turn."""
    case = find(name)
    run = make_run(case, Path(folder), *overrides)
    memory: dict[str, int] = {}
    update = run.learner.update

    def measured_update(*args: Any) -> Any:
        turns.forget_peak()
        try:
            return update(*args)
        finally:
            memory["learner_peak"] = turns.peak_bytes()

    run.learner.update = measured_update  # type: ignore[method-assign]
    turns.report(ready=True)
    taken = steps(run)
    while True:
        turns.wait()
        started = time.perf_counter()
        step, metrics, _ = next(taken)
        run.directory.log(step, metrics)
        run.complete(step)
        turns.settle()
        seconds = time.perf_counter() - started
        turns.report(
            step=seconds,
            rollout=metrics["time/rollout"],
            learner=metrics["time/learner"],
            tokens=round(metrics["response/length_mean"] * run.config.rollout.num_prompts * GROUP),
            **memory,
        )


if __name__ == "__main__":
    turns.take_standard_output()
    main(*sys.argv[1:])
