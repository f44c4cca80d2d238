"""The training loop: sample, grade, learn, measure, repeat."""

from __future__ import annotations

import logging
import resource
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rlzoo.analysis.profile import LengthProfile, without_bin_intervals
from rlzoo.config import RunConfig
from rlzoo.engine.collect import Batch, collect
from rlzoo.engine.experience import Experience
from rlzoo.engine.learner import Learner, Update
from rlzoo.engine.metrics import aggregate_metrics, policy_settings, rollout_metrics, update_metrics
from rlzoo.engine.monitor import WINDOW, Monitor
from rlzoo.engine.pretrained import eos_token_ids, load_pretrained
from rlzoo.engine.run_directory import RunDirectory
from rlzoo.engine.samplers import make_sampler
from rlzoo.engine.seeds import LEARNER, ROLLOUT, step_seed
from rlzoo.engine.shaping import reward_metrics
from rlzoo.errors import PolicyError, UserError
from rlzoo.tasks import Task
from rlzoo.tracking import Tracker, git_commit
from rlzoo.types import Problem, RolloutGroup
from rlzoo.zoo import load_zoo

logger = logging.getLogger("rlzoo")

Observer = Callable[[int, Mapping[str, float]], None]
"""Called with the step and its metrics after each step, and with step 0 after the first evaluation."""

EVAL_SEED = 2**31  # every policy and seed is evaluated with the same draws


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run came to.

    Example:
        ``result.metrics[-1]["reward/mean"]``
    """

    path: Path  # the run directory
    metrics: list[dict[str, float]]  # one dict per step, first that of step 0
    mlflow_run_id: str | None
    profile: LengthProfile | None = None  # of the clip by length, over the last steps


def train(config: RunConfig, observer: Observer | None = None) -> RunResult:
    """Train a model as the configuration says; what ``rlzoo train`` does.

    Args:
        config: the complete run.
        observer: told every step's metrics, for progress displays.

    Raises:
        UserError: the run cannot start as configured; nothing has been written then.
    """
    task = config.task if config.task.seed is not None else config.task.model_copy(update={"seed": config.seed})
    with task:
        run = Run(config, task)
        with closing(run.sampler), run.open() as tracker:
            return run.execute(tracker, observer)


class Run:
    """The pieces of one run, made from its configuration."""

    def __init__(self, config: RunConfig, task: Task) -> None:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        name = f"{config.clip.name}-{task.name.replace(':', '-')}-{config.seed}-{stamp}"
        path = config.output or Path("runs") / name
        RunDirectory.check_free(path)
        self.config = config.model_copy(update={"output": path})
        self.task = task
        self.model, self.tokenizer = load_pretrained(config.model.path, config.model.dtype, config.model.attn_implementation)
        self.learner = Learner(
            self.model,
            config.clip,
            config.learner,
            pad_id=int(self.tokenizer.pad_token_id),
            max_length=config.rollout.max_new_tokens,
            num_updates=config.steps * config.learner.num_minibatches * config.learner.num_epochs,
            temperature=config.rollout.temperature,
            reward=config.reward,
        )
        if self.learner.accelerator.num_processes > 1:
            raise UserError("training runs in one process; start it without a launcher")
        self.sampler = make_sampler(self.model, self.tokenizer, eos_token_ids(self.model, self.tokenizer), config)
        self.synced_version = -1  # optimizer steps behind the sampler's weights
        self.held_out = task.held_out_problems(config.eval.num_problems) if config.eval.num_problems else []
        self.directory = RunDirectory.create(path, self.config.to_yaml(), self.config.plugins)
        self.monitor = Monitor(config.clip)
        self.next_problem = 0  # training problems sampled so far, whether or not they were learned from
        self.metrics: list[dict[str, float]] = []
        self.completions: list[dict[str, Any]] = []

    def open(self) -> Tracker:
        """Start tracking."""
        config = self.config
        tags = {
            "clip": config.clip.name,
            "clip_source": self.clip_source(),
            "seed": str(config.seed),
            "task": self.task.name,
            "model": config.model.path,
            "git_commit": git_commit(),
            "rlzoo_version": _version(),
        }
        return Tracker(
            config.tracking.experiment if config.tracking.mlflow else None,
            self.directory.path.name,
            tags=tags,
            params=config.model_dump(mode="json"),
        )

    def clip_source(self) -> str:
        """Distribution and version, or file, that the policy comes from; its module for one made in Python."""
        entry = load_zoo(self.config.plugins).entries.get(self.config.clip.name)
        kind = type(self.config.clip)
        return entry.source if entry is not None and entry.policy is kind else kind.__module__

    def execute(self, tracker: Tracker, observer: Observer | None) -> RunResult:
        """Run every step; a run that is stopped or fails leaves its last checkpoint and its completions."""
        tracker.log_file(self.directory.path / "config.yaml")
        self.directory.summarise(self._summary(tracker, finished=False))
        if self.config.learner.num_minibatches * self.config.learner.num_epochs == 1:
            logger.warning(
                "clip is inert: one update per rollout, so every ratio is 1; "
                "raise learner.num_minibatches or learner.num_epochs for a clip to act"
            )
        step, started = 0, time.perf_counter()
        try:
            self._report(0, self.evaluate(), tracker, observer)
            for step in range(1, self.config.steps + 1):
                self._report(step, self.step(step), tracker, observer)
                if self._is_due(step, self.config.tracking.figure_every) and step != self.config.steps:
                    self.monitor.log_figure(tracker, step)
        except PolicyError as error:
            error.add_note(f"step {step}, everything so far in {self.directory.path}")
            raise
        finally:
            if step:
                self.save(step)
            tracker.log_completions(self.completions)
            if self.metrics:
                tracker.log_file(self.directory.path / "metrics.jsonl")
        profile = self.monitor.profile()
        seconds = {"seconds": round(time.perf_counter() - started, 3)}
        aggregates = aggregate_metrics(self.metrics, profile, WINDOW)
        self.directory.summarise({**self._summary(tracker, finished=True), **seconds, "metrics": aggregates})
        tracker.log(step, aggregates)
        self.monitor.log_figure(tracker, step)
        tracker.set_tag("warnings", ", ".join(self.monitor.alarms.raised))
        return RunResult(self.directory.path, self.metrics, tracker.run_id, profile)

    def _summary(self, tracker: Tracker, *, finished: bool) -> dict[str, object]:
        return {
            "finished": finished,
            "steps": self.config.steps,
            "peak_memory_bytes": peak_memory(),
            "warnings": self.monitor.alarms.raised,
            "mlflow_run_id": tracker.run_id,
        }

    def step(self, step: int) -> dict[str, float]:
        """One rollout batch and everything learned from it."""
        started = time.perf_counter()
        batch = self.rollout(step)
        groups = batch.groups
        sampled = time.perf_counter()
        settings, limit = self.config.reward, self.config.rollout.max_new_tokens
        experience = Experience.from_groups(groups, self.learner.policy.advantage, settings, limit)
        updates: list[Update] = []
        if bool((experience.advantages != 0).any()) or self.learner.reference is not None:
            try:
                keep = self._is_due(step, self.config.checkpoint.keep_for_replay)
                before = partial(self.directory.save_weights, step, model=self.model) if keep else None
                experience, updates = self.learner.update(experience, step_seed(self.config.seed, LEARNER, step), before)
            except PolicyError:
                self.directory.record_rollouts(step, groups, experience, updates)  # the data it stumbled over
                raise
        learned = time.perf_counter()
        self.directory.record_rollouts(step, groups, experience, updates)
        self._keep_completions(step, groups)
        num_tokens = int(experience.lengths.sum())
        metrics = rollout_metrics(groups) | reward_metrics(experience, settings)
        moved = policy_settings(self.learner.policy, self.config.clip)
        metrics |= (
            update_metrics(updates, with_kl=self.config.learner.kl_coef > 0, with_band=self.learner.policy != self.config.clip)
            | moved
        )
        if self.config.rollout.dynamic_sampling:
            metrics |= batch.metrics()
        metrics |= {
            "time/rollout": sampled - started,
            "time/learner": learned - sampled,
            "throughput/tokens_per_second": num_tokens / (learned - started),
        }
        self.monitor.after_step([update.table for update in updates], metrics)
        if self._is_due(step, self.config.eval.every) or (step == self.config.steps):
            metrics |= self.evaluate()
        if self._is_due(step, self.config.checkpoint.every) and step != self.config.steps:
            self.save(step)
        return metrics

    def save(self, step: int) -> Path:
        """Save the model, and the policy's state beside it."""
        keep = self.config.checkpoint.keep
        return self.directory.save_checkpoint(f"step-{step:06d}", self.model, self.tokenizer, self.learner.policy, keep)

    def rollout(self, step: int) -> Batch:
        """Sample and grade one batch: ``num_prompts`` groups of ``group_size``."""
        settings = self.config.rollout
        return collect(lambda turn: self._sample_round(step, turn), settings.num_prompts, settings.dynamic_sampling)

    def _sample_round(self, step: int, turn: int) -> list[RolloutGroup]:
        """Responses to the next training problems; every round of a step has a draw of its own."""
        settings = self.config.rollout
        problems = self.task.train_problems(self.next_problem, settings.num_prompts)
        self.next_problem += settings.num_prompts
        return self._sample_and_grade(
            problems, settings.group_size, settings.temperature, step_seed(self.config.seed, ROLLOUT, step, turn)
        )

    def evaluate(self) -> dict[str, float]:
        """Mean reward on held-out problems; nothing without ``eval.num_problems``."""
        if not self.held_out:
            return {}
        settings = self.config.eval
        groups = self._sample_and_grade(self.held_out, settings.num_samples, settings.temperature, EVAL_SEED)
        rewards = [rollout.reward for group in groups for rollout in group.rollouts]
        return {"eval/accuracy": sum(rewards) / len(rewards)}

    def _sample_and_grade(self, problems: list[Problem], samples: int, temperature: float, seed: int) -> list[RolloutGroup]:
        prompts = [self.task.prompt(problem) for problem in problems]
        version = self.learner.num_optimizer_steps
        if self.sampler.needs_weights and version != self.synced_version:
            self.sampler.update_weights(self.model.state_dict().items())
            self.synced_version = version
        with self.learner.accelerator.autocast():
            rollouts = self.sampler.sample(prompts, samples, seed=seed, temperature=temperature, policy_version=version)
        asked = [problem for problem in problems for _ in range(samples)]
        rewards = self.task.grade(asked, [rollout.text for rollout in rollouts])
        graded = [replace(rollout, reward=float(reward)) for rollout, reward in zip(rollouts, rewards, strict=True)]
        return [
            RolloutGroup(problem, tuple(graded[index * samples : (index + 1) * samples]))
            for index, problem in enumerate(problems)
        ]

    def _report(self, step: int, metrics: dict[str, float], tracker: Tracker, observer: Observer | None) -> None:
        self.metrics.append(metrics)
        self.directory.log(step, metrics)
        tracker.log(step, without_bin_intervals(metrics))
        if observer is not None:
            observer(step, metrics)

    def _keep_completions(self, step: int, groups: list[RolloutGroup]) -> None:
        shown = [(group.problem, group.rollouts[0]) for group in groups][: self.config.tracking.completions]
        self.completions += [
            {
                "step": step,
                "question": problem.question,
                "answer": problem.answer,
                "response": rollout.text,
                "reward": rollout.reward,
                "length": len(rollout.response_ids),
            }
            for problem, rollout in shown
        ]

    def _is_due(self, step: int, every: int) -> bool:
        return every > 0 and step % every == 0


def peak_memory() -> int:
    """The most memory this process has held so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _version() -> str:
    from importlib.metadata import version

    return version("rlzoo")
