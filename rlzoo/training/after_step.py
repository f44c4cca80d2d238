"""What follows every training step: evaluation, logging, checkpoints, figures, and stopping."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from rlzoo.journal.checkpoints import own_checkpoints
from rlzoo.journal.manifest import damage
from rlzoo.journal.state import RunState
from rlzoo.journal.tracking.tracker import Tracker
from rlzoo.learner.learner import Update
from rlzoo.measure.monitor import WINDOW
from rlzoo.support.signals import StopRequest
from rlzoo.training.run import Run

FEWEST_NORMS = 10
"""Steps before a gradient norm can count as a spike."""

Observer = Callable[[int, Mapping[str, float]], None]
"""Called with the step and its metrics after each step, and with step 0 after the first evaluation."""

Stage = Callable[[str], None]
"""Called with a few words before something other than a step begins, such as ``"evaluating 1,000 problems"``."""

logger = logging.getLogger("rlzoo")


class AfterStep:
    """Does what follows a step."""

    def __init__(
        self, run: Run, tracker: Tracker, stop: StopRequest, observer: Observer | None = None, stage: Stage | None = None
    ) -> None:
        self.run = run
        self.tracker = tracker
        self.stop = stop
        self.observer = observer
        self.stage = stage

    def __call__(self, step: int, row: dict[str, float], updates: Sequence[Update] = ()) -> None:
        """Finish a step, given its metrics; step 0 is the evaluation before the first one.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed during the step; the run is saved.
            SystemExit: SIGTERM arrived during the step; the run is saved.
        """
        run, config = self.run, self.run.config
        if step:
            if is_spike(row, run.metrics[-WINDOW:], config.learner.rollback_above):
                row["learner/rolled_back"] = float(self._roll_back(step))
            run.monitor.after_step(step, [update.table for update in updates], row)
        if step in (0, config.steps) or run.is_due(step, config.eval.every):
            if self.stage is not None and run.is_main and config.eval.num_problems:
                self.stage(f"evaluating {config.eval.num_problems:,} problems")
            row |= run.evaluate()
        row["time/clock"] = time.time()
        run.metrics.append(row)
        run.directory.log(step, row)
        self.tracker.look()
        if self.observer is not None and run.is_main:
            self.observer(step, row)
        run.complete(step)
        is_stopping = run.learner.micro_batches.any(self.stop.signal is not None)
        # with the checkpoint of step 0, a run that has steps can always be resumed
        if step in (0, config.steps) or run.is_due(step, config.checkpoint.every) or is_stopping:
            run.save(step)
        if step == config.steps or run.is_due(step, config.tracking.figure_every):
            self._draw(step)
        if is_stopping and step < config.steps:
            self.stop.end(f"stopped after step {step} of {config.steps}; resume with: {run.how_to_resume}")

    def _roll_back(self, step: int) -> bool:
        """Load the newest periodic checkpoint's weights, and continue with other data; False if there is none yet.

        A checkpoint that was saved because the run was stopped does not count: a run that was never stopped has none.
        """
        run = self.run
        periodic = [folder for state, folder in own_checkpoints(run.directory.path, step - 1) if state.periodic]
        folder = next((folder / "state" for folder in reversed(periodic) if damage(folder) is None), None)
        if folder is None:
            logger.warning("step %d: a spike of the gradient, and no checkpoint to roll back to", step)
            return False
        state = RunState.read(folder)
        # the schedule continues from here, so that it still ends with the run
        run.learner.load(folder, state.num_optimizer_steps, run.learner.scheduler.last_epoch)
        run.rollouts.forget_ahead()  # sampled by weights that are gone
        logger.warning("step %d: a spike of the gradient; the weights are those after step %d again", step, state.step)
        return True

    def _draw(self, step: int) -> None:
        """Save a figure of the clip fraction by length."""
        figure = self.run.monitor.figure(step) if self.tracker.is_on else None
        if figure is not None:
            self.run.directory.save_figure(figure, f"clip_by_length/step-{step:06d}.png")
            del figure
            gc.collect()  # a figure takes two megabytes and refers to itself


def is_spike(metrics: Mapping[str, float], before: Sequence[Mapping[str, float]], limit: float | None) -> bool:
    """Tell whether a step's gradient norm is more than ``limit`` times the median of those before; None: never."""
    norms = [row["learner/grad_norm"] for row in before if "learner/grad_norm" in row]
    if limit is None or len(norms) < FEWEST_NORMS:
        return False
    return metrics.get("learner/grad_norm", 0.0) > limit * median(norms)
