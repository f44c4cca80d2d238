"""The work between training steps: evaluation, logging, checkpoints, figures and stopping."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from rlzoo.journal.tracking.tracker import Tracker
from rlzoo.learner.learner import Update
from rlzoo.training.run import Run
from rlzoo.training.signals import StopRequest

Observer = Callable[[int, Mapping[str, float]], None]
"""Called after each step with the step's number and metrics, and after the first evaluation with number 0."""

Stage = Callable[[str], None]
"""Called with a short description before work outside the training steps, such as ``"evaluating 1,000 problems"``."""


class AfterStep:
    """Evaluates the model, logs metrics and saves the run after a training step, and stops the run on request."""

    def __init__(
        self, run: Run, tracker: Tracker, stop: StopRequest, observer: Observer | None = None, stage: Stage | None = None
    ) -> None:
        self.run = run
        self.tracker = tracker
        self.stop = stop
        self.observer = observer
        self.stage = stage

    def __call__(self, step: int, row: dict[str, float], updates: Sequence[Update] = ()) -> None:
        """Finish a step, given its metrics. Step 0 is the evaluation before training.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed during the step; the run is saved.
            SystemExit: SIGTERM arrived during the step; the run is saved.
        """
        run, config = self.run, self.run.config
        if step:
            run.monitor.after_step(step, [update.minibatch.table for update in updates], row)
        if step in (0, config.steps) or run.is_due(step, config.eval.every):
            if self.stage is not None and run.is_main and config.eval.num_problems:
                self.stage(f"evaluating {config.eval.num_problems:,} problems")
            row |= run.evaluate()
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
        if run.is_drawn(step):
            self._draw(step)
        if is_stopping and step < config.steps:
            self.stop.end(f"stopped after step {step} of {config.steps}; resume with: {run.how_to_resume}")

    def _draw(self, step: int) -> None:
        """Save a figure of the clip fraction by length."""
        figure = self.run.monitor.figure(step) if self.tracker.is_on else None
        if figure is not None:
            self.run.directory.save_figure(f"clip_by_length/step-{step:06d}.png", partial(figure.savefig, format="png"))
            del figure
            gc.collect()  # a figure takes 2 MB and contains reference cycles
