"""Does the work between training steps: evaluation, logging, checkpoints and stopping."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rlzoo.journal.checkpoints import own_checkpoints
from rlzoo.journal.manifest import damage
from rlzoo.journal.state import FILE, RunState
from rlzoo.journal.tracking.tracker import Tracker
from rlzoo.learner.learner import Update
from rlzoo.models.exchange import distributed
from rlzoo.models.processes import gather
from rlzoo.training.run import Run
from rlzoo.training.stopping import StopRequest

FEWEST_NORMS = 10
"""Number of earlier gradient norms required for spike detection."""

Observer = Callable[[int, Mapping[str, float]], None]
"""A callback that receives the number and metrics of each step, with number 0 for the evaluation before training."""

Stage = Callable[[str], None]
"""A callback that receives a description, such as ``"evaluating 1,000 problems"``, before work outside training steps."""

logger = logging.getLogger("rlzoo")


@dataclass(frozen=True, slots=True)
class AfterStep:
    """Evaluates the model, logs metrics, and saves the run after a training step. Stops the run on request."""

    run: Run
    tracker: Tracker
    stop: StopRequest
    observer: Observer | None = None
    stage: Stage | None = None

    def __call__(self, step: int, row: dict[str, float], updates: Sequence[Update] = ()) -> None:
        """Finish a step, given its metrics. Step 0 is the evaluation before training.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed during the step; the run is saved.
            SystemExit: SIGTERM arrived during the step; the run is saved.
        """
        run, config = self.run, self.run.config
        if step:
            if is_spike(row, run.recent, config.learner.rollback_above):
                row["learner/rolled_back"] = float(self._roll_back(step))
            run.monitor.after_step(step, [update.minibatch.table for update in updates], row)
        if step in (0, config.steps) or run.is_due(step, config.eval.every):
            if self.stage is not None and run.is_main and config.eval.num_problems:
                self.stage(f"evaluating {config.eval.num_problems:,} problems")
            row |= run.evaluate(step)
        row["time/clock"] = time.time()
        run.remember(step, row)
        run.directory.log(step, row)
        self.tracker.look()
        if self.observer is not None and run.is_main:
            self.observer(step, row)
        run.complete(step)
        is_stopping = run.learner.micro_batches.any(self.stop.signal is not None)
        # with a checkpoint at step 0, every run that has begun can be resumed
        if step in (0, config.steps) or run.is_due(step, config.checkpoint.every) or is_stopping:
            run.save(step)
        if is_stopping and step < config.steps:
            self.stop.end(f"stopped after step {step} of {config.steps}; resume with: {run.how_to_resume}")

    def _roll_back(self, step: int) -> bool:
        """Restore the weights of the newest periodic checkpoint. Return False if there is none yet.

        Training continues with new data. Checkpoints that were saved because the run was stopped are not used, so that
        an interrupted run gives the same results as an uninterrupted one.
        """
        run, found = self.run, None
        if run.is_main:
            periodic = [folder / "state" for state, folder in own_checkpoints(run.directory.path, step - 1) if state.periodic]
            found = next((folder for folder in reversed(periodic) if damage(folder.parent) is None), None)
        found = gather(run.accelerator, [found])[0]
        if found is None:
            logger.warning("step %d: gradient spike, but there is no checkpoint to roll back to", step)
            return False
        with distributed(run.accelerator, found, FILE) as folder:
            state = RunState.read(folder)
            # the schedule is not rolled back, so that it still ends with the run
            run.learner.load(folder, state.num_optimizer_steps, run.learner.scheduler.last_epoch)
        run.rollouts.forget_ahead()  # these batches were sampled with the discarded weights
        logger.warning("step %d: gradient spike; restored the weights from step %d", step, state.step)
        return True


def is_spike(metrics: Mapping[str, float], before: Iterable[Mapping[str, float]], limit: float | None) -> bool:
    """Whether a gradient norm exceeds ``limit`` times the median of the previous norms. False if ``limit`` is None."""
    rows = list(before)
    for name in ("learner/grad_norm", "critic/grad_norm"):
        norms = [row[name] for row in rows if name in row]
        if limit is not None and len(norms) >= FEWEST_NORMS and metrics.get(name, 0.0) > limit * median(norms):
            return True
    return False
