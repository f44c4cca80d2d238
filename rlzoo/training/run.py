"""The objects that make up a training run, with methods to save and resume the run."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from rlzoo.core.errors import UserError
from rlzoo.gate.enter import Admission
from rlzoo.gate.fingerprint import resume_command
from rlzoo.journal.recorded import RecordedRollouts
from rlzoo.journal.rollouts import rollout_file, transcripts
from rlzoo.journal.run_directory import RunDirectory
from rlzoo.journal.state import FILE, RunState, newest_state
from rlzoo.learner.batch import AdvantageBatch, ScoredBatch
from rlzoo.learner.learner import Update
from rlzoo.learner.optimization import kept_weights, named_adapter
from rlzoo.measure.monitor import WINDOW, Monitor
from rlzoo.models.exchange import collect, distributed
from rlzoo.models.processes import gather, peak_memory
from rlzoo.rollout.rollouts import Rollouts, Sampled
from rlzoo.training.mismatch import refuse_mismatch
from rlzoo.training.response_page import response_page

logger = logging.getLogger("rlzoo")


class Run:
    """The rollouts, learner, monitor and run directory of one run, built from its configuration."""

    def __init__(self, admission: Admission) -> None:
        """Open the run directory and restore the newest checkpoint if the run is resumed."""
        self.config, self.task, self.accelerator = admission.config, admission.task, admission.accelerator
        self.facts = admission.facts
        self.model, self.tokenizer = admission.model, admission.tokenizer
        self.is_main = self.accelerator.is_main_process
        config, path = self.config, self.config.output
        assert path is not None, "set at the gate"
        self.learner = admission.learner
        rollouts = Rollouts if config.rollout.recorded is None else RecordedRollouts
        self.rollouts = rollouts(config, self.task, admission.sampler, self.accelerator)
        self.monitor = Monitor(config.clip, expects_mismatch=config.rollout.recorded is not None)
        self.recent: deque[dict[str, float]] = deque(maxlen=WINDOW)  # metrics of the last steps only
        self.accuracies: dict[int, float] = {}  # accuracy of each evaluation, by step
        self.done = 0  # number of completed steps
        self._began, self._before = time.perf_counter(), 0.0
        self.saved = -1  # step of the last checkpoint
        self.attempted = 0  # last step that was started
        self.is_clean = True  # whether the state is unchanged since the last completed step
        with ExitStack() as failed:
            failed.callback(self.rollouts.close)
            if admission.resume:
                self.directory, checkpoint = self._reopen(path)
                failed.callback(self.directory.close)
                for level, line in admission.changes:
                    logger.log(level, "--resume: %s", line)
                if checkpoint is None:
                    logger.warning("%s has no steps yet: starting at step 0", self.directory.path)
                    self.directory.cut_after(-1)
                else:
                    with distributed(self.accelerator, checkpoint, FILE) as state:
                        self._restore(state)
                if admission.allow_changed:
                    self.directory.allow_change(self.facts)
            else:
                new = (path, config.to_yaml(), config.plugins, self.facts)
                self.directory = RunDirectory.create(*new) if self.is_main else RunDirectory(path, is_writer=False)
            # every process needs this ID to name temporary folders, but only the main process is sure to see the ID's file
            self.directory.identity = gather(self.accelerator, [self.directory.identity if self.is_main else ""])[0]
            failed.pop_all()

    def _reopen(self, path: Path) -> tuple[RunDirectory, Path | None]:
        """Open the run directory and return the state to resume from. All processes raise the main process's error."""
        state: Path | Exception | None = None
        with ExitStack() as failed:
            if self.is_main:
                try:
                    directory = RunDirectory.resume(path)
                    failed.callback(directory.close)
                    state = newest_state(path)
                except (UserError, OSError) as error:
                    state = error
            state = gather(self.accelerator, [state])[0]
            if isinstance(state, Exception):
                raise state
            failed.pop_all()
        return (directory if self.is_main else RunDirectory(path, is_writer=False)), state

    def _restore(self, folder: Path) -> None:
        """Restore the state from a checkpoint."""
        state = RunState.read(folder)
        updates = state.step * self.config.learner.num_minibatches * self.config.learner.num_epochs
        rollout, sizes = self.config.rollout, {len(batch.rollouts) for batch in state.queue if batch.rollouts is not None}
        if state.step > self.config.steps:
            raise UserError(
                f"--resume: checkpoint {str(folder.parent)!r} is from step {state.step}, but the run ends at step "
                f"{self.config.steps} (steps); raise steps"
            )
        if len(state.queue) > rollout.max_staleness or sizes - {rollout.num_prompts * rollout.group_size}:
            raise UserError(
                f"--resume: {str(folder)!r} holds batches that were sampled ahead with different rollout settings; "
                "restore these settings"
            )
        self.learner.load(folder, state.num_optimizer_steps, updates)
        self.learner.num_nonfinite = state.num_nonfinite
        if self.learner.critic is not None:
            self.learner.critic.num_nonfinite = state.critic_nonfinite
        self.rollouts.restore(state.step, state.next_problem, state.queue, state.measured)
        self.monitor.restore(folder, state.alarms)
        self.done, self.saved, self._before = state.step, state.step, state.seconds
        self.accelerator.wait_for_everyone()
        rows = gather(self.accelerator, [self.directory.cut_after(state.step) if self.is_main else []])[0]
        for step, row in enumerate(rows):
            self.remember(step, row)
        self._newest()
        logger.info("resuming from %s", folder.parent)

    def summary(self, *, finished: bool) -> dict[str, object]:
        """Return the contents of ``summary.json``."""
        return {
            "finished": finished,
            "steps": self.config.steps,
            "peak_memory_bytes": peak_memory(),
            "warnings": self.monitor.raised,
        }

    @contextmanager
    def attempt(self, step: int) -> Iterator[None]:
        """Run the block as one step. If the step fails before its first update, restore the state from before the step."""
        self.attempted, position, updates = step, self.rollouts.position(), self.learner.position
        try:
            yield
        except BaseException:
            self.is_clean = self.is_clean and self.learner.position == updates
            if self.is_clean:
                self.rollouts.go_back(position)
            raise
        self.is_clean = False

    def before_update(self, batch: ScoredBatch) -> None:
        """Check the sampler's log-probs.

        Raises:
            RunError: the sampler reads the learner's weights but computes different log-probs.
        """
        if self.config.rollout.recorded is None and not self.rollouts.sampler.needs_weights:
            refuse_mismatch(self.config, batch)
        self.is_clean = False

    def sample(self, step: int) -> Sampled:
        """Sample and grade the responses of a step, and start sampling for later steps.

        If the responses were sampled ahead, only the groups that dynamic sampling adds are sampled now. Saving a checkpoint
        waits for every batch whose sampling has begun, so it need not store the older weights that these batches use.
        """
        version = self.learner.num_optimizer_steps
        if self.rollouts.sampler.in_flight:
            self._newest()
        sampled = replace(self.rollouts.take(step, self._newest), learner_version=version)
        self.rollouts.look_ahead(step, version, self.learner.weights)
        return sampled

    def record(self, sampled: Sampled, batch: AdvantageBatch, updates: Sequence[Update]) -> None:
        """Write the step's responses and log-probs to the run directory as text, as a rollout file and as an MLflow page."""
        if self.is_main:
            texts = transcripts(sampled.groups, batch, updates)
            step = rollout_file(self.config, batch, sampled.groups, updates, sampled.learner_version)
            self.directory.save_rollouts(texts, replace(step, **sampled.unknown))
            tracking = self.config.tracking
            is_due = batch.step == self.config.steps or self.is_due(batch.step, tracking.figure_every)
            if tracking.mlflow and tracking.completions and updates and is_due:
                assert isinstance(batch, ScoredBatch), "the updates have made it one"
                page = response_page(self.config, self.tokenizer, sampled.groups, batch, updates)
                # completions.html always holds the newest page
                for name in (f"completions/step-{batch.step:06d}.html", "completions.html"):
                    self.directory.save_figure(name, lambda file: file.write_text(page, encoding="utf-8"))

    def _newest(self) -> int:
        """Give the sampler the current weights and return the number of optimizer steps that produced them."""
        version = self.learner.num_optimizer_steps
        self.rollouts.update_weights(version, self.learner.weights)
        return version

    def save(self, step: int) -> None:
        """Save a checkpoint with the model, the state of the rule, and everything else that is needed to resume."""
        weights = kept_weights(self.learner.weights(), keep=self.is_main)
        adapter = kept_weights(named_adapter(self.model), keep=self.is_main) or None
        critic = self.learner.critic
        values = kept_weights(critic.weights(), keep=self.is_main) if critic is not None else {}
        model = (self.model, weights, self.tokenizer, self.learner.policy)
        keep = self.config.checkpoint.keep
        with self.directory.checkpoint(step, *model, adapter=adapter, keep=keep, scores=self.accuracies) as folder:
            self.accelerator.wait_for_everyone()
            self.learner.save(folder / "state")
            collect(self.accelerator, folder / "state")
            state = self._state(step)  # collective, so every process must call it
            if self.is_main:
                state.write(folder / "state")
                self.monitor.save(folder / "state")
                if critic is not None:
                    critic.save_model(folder / "critic", values, self.tokenizer)
            self.accelerator.wait_for_everyone()
        self.saved = step

    def _state(self, step: int) -> RunState:
        return RunState(
            step=step,
            num_optimizer_steps=self.learner.num_optimizer_steps,
            next_problem=self.rollouts.next_problem,
            num_nonfinite=self.learner.num_nonfinite,
            alarms=self.monitor.alarm_state(),
            seconds=self.seconds,
            run=self.directory.identity,
            periodic=self.is_due(step, self.config.checkpoint.every),
            queue=self.rollouts.queued(),
            measured=self.rollouts.measured,
            critic_nonfinite=self.learner.critic.num_nonfinite if self.learner.critic is not None else 0,
        )

    def remember(self, step: int, row: dict[str, float]) -> None:
        """Keep the metrics of a step for as long as later steps need them."""
        self.recent.append(row)
        if "eval/accuracy" in row:
            self.accuracies[step] = row["eval/accuracy"]

    def complete(self, step: int) -> None:
        """Mark a step as completed, so that the run can be saved."""
        self.done, self.is_clean = step, True

    def leave(self) -> None:
        """End the run. Save it if the failed step made no update, because the state is then still that of the previous step."""
        try:
            # saving is collective, and other processes may have failed elsewhere
            launch, is_alone = self.config.launch, self.accelerator.num_processes == 1
            is_sharded = launch.fsdp or launch.deepspeed is not None
            if is_alone and not is_sharded and self.is_clean and self.saved < self.done < self.attempted:
                self.save(self.done)
        except Exception as error:  # do not hide the error that ended the run
            logger.warning("step %d could not be saved: %s", self.done, error)
        finally:
            self.rollouts.close()

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate the current weights on the held-out problems, save the rewards, and return the metrics."""
        metrics, rewards = self.rollouts.evaluate(self._newest)
        if rewards:
            self.directory.save_evaluation(step, rewards)
        return metrics

    @property
    def seconds(self) -> float:
        """Training time so far in seconds, including the time before the run was resumed."""
        return self._before + time.perf_counter() - self._began

    def is_due(self, step: int, every: int) -> bool:
        """Whether the step is a multiple of ``every``. False if ``every`` is 0."""
        return every > 0 and step > 0 and step % every == 0

    @property
    def how_to_resume(self) -> str:
        """Instructions for resuming the run with a command or, if no plugin provides the rule's class, in Python."""
        kind, path = type(self.config.clip), str(self.directory.path)
        if kind in self.config.plugins.zoo.values():
            return resume_command(self.directory.path, self.facts)
        return f"rlzoo.train(config, resume=True) in Python, with the same class {kind.__qualname__} and output={path!r}"
