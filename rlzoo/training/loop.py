"""The training algorithm, written as a loop over steps. `rlzoo.training.after_step` does the work between steps."""

from __future__ import annotations

from collections.abc import Iterator

from rlzoo.core.errors import PolicyError, RunError
from rlzoo.learner.batch import collate
from rlzoo.learner.learner import Update
from rlzoo.rollout.seeds import LEARNER, step_seed
from rlzoo.training.metrics import Stopwatch, step_metrics
from rlzoo.training.run import Run


def steps(run: Run) -> Iterator[tuple[int, dict[str, float], list[Update]]]:
    """Train, yielding the number, metrics and updates of each step when the step is done."""
    for step in range(run.done + 1, run.config.steps + 1):
        seed, watch = step_seed(run.config.seed, LEARNER, step), Stopwatch()
        with run.attempt(step):
            sampled = run.sample(step)  # sample and grade: a group of responses for each prompt
            watch.lap("rollout")
            batch = run.learner.score(collate(sampled.groups, step), seed)  # advantages and reference log-probs
            try:
                batch, updates = run.learner.update(batch, run.before_update)  # one optimizer step for each minibatch
            except (PolicyError, RunError):
                run.record(sampled, batch, [])  # keep the data that the update failed on
                raise
            watch.lap("learner")
            run.record(sampled, batch, updates)
            row = step_metrics(run, sampled, batch, updates) | watch.metrics(batch)
        yield step, row, updates
