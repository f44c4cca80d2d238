"""The training loop: sample, grade, learn, measure, repeat."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rlzoo.analysis.profile import LengthProfile
from rlzoo.config import RunConfig
from rlzoo.engine.collect import Batch
from rlzoo.engine.experience import Experience
from rlzoo.engine.learner import Learner, Update
from rlzoo.engine.metrics import (
    aggregate_metrics,
    mean_version,
    policy_settings,
    rollout_metrics,
    update_metrics,
)
from rlzoo.engine.mismatch import mismatch_metrics
from rlzoo.engine.monitor import WINDOW, Monitor
from rlzoo.engine.optimization import is_shared, is_spread, kept_weights
from rlzoo.engine.passes import gather
from rlzoo.engine.pretrained import eos_token_ids, load_named
from rlzoo.engine.processes import make_accelerator, peak_memory
from rlzoo.engine.run_directory import RunDirectory
from rlzoo.engine.samplers import make_sampler
from rlzoo.engine.sampling import RolloutSource
from rlzoo.engine.seeds import LEARNER, step_seed
from rlzoo.engine.shaping import reward_metrics
from rlzoo.engine.state import RunState, newest_state
from rlzoo.engine.tags import run_tags
from rlzoo.errors import PolicyError
from rlzoo.tasks import Task
from rlzoo.tracking.record import Record
from rlzoo.tracking.tracker import Tracker

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


def train(config: RunConfig, observer: Observer | None = None, *, resume: bool = False) -> RunResult:
    """Train a model as the configuration says; what ``rlzoo train`` does.

    Args:
        config: the complete run.
        observer: told every step's metrics, for progress displays.
        resume: go on from the newest checkpoint in ``config.output``.

    Raises:
        UserError: the run cannot start as configured; nothing has been written then.
    """
    config.refuse_redacted()
    task = config.task if config.task.seed is not None else config.task.model_copy(update={"seed": config.seed})
    is_main = os.environ.get("RANK", "0") == "0"
    with task, ExitStack() as last, Tracker(config.tracking.mlflow and is_main) as tracker:
        run = Run(config, task, resume=resume)
        last.callback(run.directory.close)
        tracker.begin(run.directory.path, run.record())
        result = run.execute(tracker, observer)
    return replace(result, mlflow_run_id=tracker.run_id)


class Run:
    """The pieces of one run, made from its configuration."""

    def __init__(self, config: RunConfig, task: Task, *, resume: bool = False) -> None:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        name = f"{config.clip.name}-{task.name.replace(':', '-')}-{config.seed}-{stamp}"
        self.accelerator = make_accelerator(config.launch, config.learner, dtype=config.model.dtype)
        self.is_main = self.accelerator.is_main_process
        path = gather(self.accelerator, [config.output or Path("runs") / name])[0]  # the clock may differ
        checkpoint = newest_state(path) if resume else None
        if self.is_main and not resume:
            RunDirectory.check_free(path)
        self.config = config.model_copy(update={"output": path})
        self.task = task
        self.model, self.tokenizer = load_named(config.model)
        # before the learner's: ZeRO-3 takes the model apart, and an adapter changes its modules
        sampler = make_sampler(
            self.model,
            self.tokenizer,
            eos_token_ids(self.model, self.tokenizer),
            named=config.model,
            settings=config.rollout,
            own_weights=config.rollout.max_staleness > 0 or is_spread(self.accelerator),
        )
        self.source = RolloutSource(config, task, sampler, self.accelerator)
        self.learner = Learner(
            self.model,
            config.clip,
            config.learner,
            pad_id=int(self.tokenizer.pad_token_id),
            max_length=config.rollout.max_new_tokens,
            num_updates=config.steps * config.learner.num_minibatches * config.learner.num_epochs,
            temperature=config.rollout.temperature,
            reward=config.reward,
            mismatch=config.mismatch,
            accelerator=self.accelerator,
        )
        self.monitor = Monitor(config.clip)
        self.metrics: list[dict[str, float]] = []
        self.done = 0  # steps
        self._given = -1  # optimizer steps of the weights the sampler has; not known before it was given any
        if checkpoint is None:
            self.directory = RunDirectory.create(path, self.config.to_yaml(), self.config.plugins, is_writer=self.is_main)
        else:
            self.directory = RunDirectory(path, is_writer=self.is_main)
            self._restore(checkpoint)

    def _restore(self, folder: Path) -> None:
        """Stand where a checkpoint was written."""
        state = RunState.read(folder)
        self.learner.load(folder, state.num_optimizer_steps, state.scheduler)
        self.source.restore(state.next_problem, state.ahead)
        self.done = state.step
        self.accelerator.wait_for_everyone()
        self.metrics = self.directory.cut_after(state.step)
        if self.source.sampler.needs_weights:
            self.source.sampler.update_weights(self.learner.weights())
        self._given = state.num_optimizer_steps

    def record(self) -> Record:
        """What MLflow is told of it."""
        config = self.config
        return Record.new(
            config.tracking.experiment,
            self.directory.path.name,
            tags=run_tags(config, self.task.name),
            params=config.model_dump(mode="json"),
            files=("config.yaml", "metrics.jsonl"),
            completions=config.tracking.completions,
        )

    def execute(self, tracker: Tracker, observer: Observer | None) -> RunResult:
        """Run every step; a run that is stopped or fails leaves its last checkpoint and its completions."""
        self.directory.summarise(self._summary(finished=False))
        if self.config.learner.num_minibatches * self.config.learner.num_epochs == 1:
            logger.warning(
                "clip is inert: one update per rollout, so every ratio is 1; "
                "raise learner.num_minibatches or learner.num_epochs for a clip to act"
            )
        step, started = self.done, time.perf_counter()
        try:
            if not self.done:
                self._report(0, self.source.evaluate(self._give_weights()), tracker, observer)
            for step in range(self.done + 1, self.config.steps + 1):
                self._report(step, self.step(step), tracker, observer)
                self.done = step
                if self._is_due(step, self.config.checkpoint.every) or step == self.config.steps:
                    self.save(step)
                if self._is_due(step, self.config.tracking.figure_every) and step != self.config.steps:
                    self._draw(step, tracker)
        except PolicyError as error:
            error.add_note(f"step {step}, everything so far in {self.directory.path}")
            raise
        finally:
            # with ZeRO a checkpoint takes all processes, and who knows where the others are
            if step > self.done and not is_shared(self.accelerator):
                self.save(step)
            self.source.close()
        profile = self.monitor.profile()
        seconds = {"seconds": round(time.perf_counter() - started, 3)}
        aggregates = aggregate_metrics(self.metrics, profile, WINDOW)
        self.directory.summarise({**self._summary(finished=True), **seconds, "metrics": aggregates})
        self._draw(step, tracker)
        tracker.conclude(step, aggregates, {"warnings": ", ".join(self.monitor.alarms.raised)})
        return RunResult(self.directory.path, self.metrics, profile)

    def _summary(self, *, finished: bool) -> dict[str, object]:
        return {
            "finished": finished,
            "steps": self.config.steps,
            "peak_memory_bytes": peak_memory(),
            "warnings": self.monitor.alarms.raised,
        }

    def step(self, step: int) -> dict[str, float]:
        """One rollout batch and everything learned from it."""
        started = time.perf_counter()
        batch = self._sample(step)
        groups = batch.groups
        sampled, sampled_at = time.perf_counter(), self.learner.num_optimizer_steps
        settings, limit = self.config.reward, self.config.rollout.max_new_tokens
        experience = Experience.from_groups(groups, self.learner.policy.advantage, settings, limit)
        updates: list[Update] = []
        if bool((experience.advantages != 0).any()) or self.learner.has_reference:
            try:
                keep = self._is_due(step, self.config.checkpoint.keep_for_replay)
                before = partial(self._keep_weights, step) if keep else None
                experience, updates = self.learner.update(experience, step_seed(self.config.seed, LEARNER, step), before)
            except PolicyError:
                self.directory.record_rollouts(step, groups, experience, updates)  # the data it stumbled over
                raise
        learned = time.perf_counter()
        self.directory.record_rollouts(step, groups, experience, updates)
        metrics = self._measured(batch, experience, updates)
        if self.config.rollout.max_staleness:
            metrics["rollout/staleness"] = sampled_at - mean_version(groups)
        metrics |= {
            "time/rollout": sampled - started,
            "time/learner": learned - sampled,
            "throughput/tokens_per_second": int(experience.lengths.sum()) / (learned - started),
        }
        self.monitor.after_step([update.table for update in updates], metrics)
        if self._is_due(step, self.config.eval.every) or step == self.config.steps:
            metrics |= self.source.evaluate(self._give_weights())
        return metrics

    def _measured(self, batch: Batch, experience: Experience, updates: list[Update]) -> dict[str, float]:
        """Metrics of one step's data and updates."""
        config, policy = self.config, self.learner.policy
        metrics = rollout_metrics(batch.groups) | reward_metrics(experience, config.reward)
        metrics |= update_metrics(updates, with_kl=config.learner.kl_coef > 0, with_band=policy != config.clip)
        metrics |= policy_settings(policy, config.clip)
        # where the sampler's log-probs may be others than the trainer's
        if updates and (self.source.sampler.needs_weights or config.mismatch.correction != "none"):
            metrics |= mismatch_metrics(experience)
        return metrics | (batch.metrics() if config.rollout.dynamic_sampling else {})

    def _sample(self, step: int) -> Batch:
        """One step's batch, by the newest weights, or by those of one step before while the next is sampled already."""
        if not self.config.rollout.max_staleness:
            return self.source.take(step, self._give_weights())
        batch = self.source.take(step, self._given)
        version = self._give_weights()
        if step < self.config.steps:
            self.source.look_ahead(step + 1, version)
        return batch

    def _give_weights(self) -> int:
        """Bring the sampler's weights up to date; returns the optimizer steps they have taken."""
        version = self.learner.num_optimizer_steps
        if self.source.sampler.needs_weights and version != self._given:
            self.source.settle()
            self.source.sampler.update_weights(self.learner.weights())
            self._given = version
        return version

    def _keep_weights(self, step: int, update: int) -> None:
        self.directory.save_weights(step, update, kept_weights(self.learner.weights(), keep=self.is_main))

    def save(self, step: int) -> None:
        """Save the model, the policy's state beside it, and, if the step is complete, what it takes to go on from it."""
        name, policy = f"step-{step:06d}", self.learner.policy
        weights = kept_weights(self.learner.weights(), keep=self.is_main)
        folder = self.directory.begin_checkpoint(name, self.model, weights, self.tokenizer, policy)
        if step == self.done:
            self.accelerator.wait_for_everyone()
            self.learner.save(folder / "state")
            state = RunState(
                step=step,
                num_optimizer_steps=self.learner.num_optimizer_steps,
                next_problem=self.source.next_problem,
                scheduler=self.learner.scheduler.state_dict(),
                ahead=self.source.sampled_ahead(),
            )
            if self.is_main:
                state.write(folder / "state")
            self.accelerator.wait_for_everyone()
        self.directory.finish_checkpoint(folder, self.config.checkpoint.keep)

    def _report(self, step: int, metrics: dict[str, float], tracker: Tracker, observer: Observer | None) -> None:
        metrics["time/clock"] = time.time()
        self.metrics.append(metrics)
        self.directory.log(step, metrics)
        tracker.look()
        if observer is not None and self.is_main:
            observer(step, metrics)

    def _draw(self, step: int, tracker: Tracker) -> None:
        figure = self.monitor.figure(step) if tracker.is_on else None
        if figure is not None:
            self.directory.save_figure(figure, f"clip_by_length/step-{step:06d}.png")

    def _is_due(self, step: int, every: int) -> bool:
        return every > 0 and step % every == 0
