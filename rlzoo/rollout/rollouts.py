"""Samples and grades groups of rollouts, which are divided among processes. A queue holds batches sampled ahead."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlzoo.config.run_config import RunConfig
from rlzoo.core.errors import RunError, UserError, did_you_mean, located
from rlzoo.models.processes import gather
from rlzoo.rollout.curriculum import Measured, choose
from rlzoo.rollout.draws import Truncation
from rlzoo.rollout.episodes import Limits, Player
from rlzoo.rollout.sampler import Sampler
from rlzoo.rollout.seeds import EVALUATION, ROLLOUT, step_seed
from rlzoo.rollout.types import QueuedBatch, Rollout, RolloutGroup
from rlzoo.tasks import Task
from rlzoo.tasks.grading import checked_grade, checked_reward
from rlzoo.tasks.problem import Problem

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger("rlzoo")

Weights = Callable[[], Iterable[tuple[str, Tensor]]]
"""A function that returns the current weights, unsharded. All processes must call it together."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The groups of one step, with statistics about how they were sampled."""

    groups: list[RolloutGroup]
    num_rounds: int  # number of sampling rounds
    num_dropped: int  # number of groups that were dropped because their rewards were equal
    failed: float = 0.0  # share of all sampled responses whose grading failed or exceeded a built-in grader's limits
    learner_version: int = 0  # number of optimizer steps taken before training on this batch
    unknown: dict[str, Any] = field(default_factory=dict)  # tensors that the recorded rollouts lack, as None


def collect(sample_round: Callable[[int], list[RolloutGroup]], num_groups: int, extra_rounds: int) -> Sampled:
    """Sample until ``num_groups`` groups have rewards that are not all equal (dynamic sampling, arXiv 2503.14476).

    If there are too few such groups, groups with equal rewards fill up the batch. Minibatches therefore have the same size
    and the same gradient noise even if the task is too easy or too hard.

    Args:
        sample_round: returns ``num_groups`` graded groups for new prompts. It is called with the round number: 0, 1, ...
        num_groups: number of groups in the batch.
        extra_rounds: maximum number of rounds after the first. With 0, the batch is the first round regardless of its rewards.
    """
    groups, rounds = sample_round(0), 1
    while rounds <= extra_rounds and sum(group.is_mixed for group in groups) < num_groups:
        groups = groups + sample_round(rounds)
        rounds += 1
    if extra_rounds:
        groups = sorted(groups, key=lambda group: not group.is_mixed)
    dropped = sum(not group.is_mixed for group in groups[num_groups:])
    return Sampled(groups[:num_groups], rounds, dropped)


@dataclass(frozen=True, slots=True)
class Ahead:
    """A queued batch that the background thread samples."""

    step: int  # number of the step that trains on the batch
    indices: list[int]  # indices of the batch's training problems, for all processes
    problems: list[Problem]
    rollouts: Future[list[Rollout]] | None = None  # this process's rollouts; None if sampling has not begun

    @property
    def is_sampled(self) -> bool:
        """Whether the rollouts are available. If sampling has begun, this property waits until it has ended."""
        if self.rollouts is None:
            return False
        wait([self.rollouts])
        return not self.rollouts.cancelled() and self.rollouts.exception() is None


class Rollouts:
    """Samples and grades the batches of a run. Every process gets the same results.

    With ``rollout.max_staleness`` = k > 0, step s queues the batches of the next k steps. One background thread samples
    them in order. The batch of step s is sampled with the weights from the start of step max(1, s - k).
    """

    def __init__(self, config: RunConfig, task: Task, sampler: Sampler, accelerator: Accelerator) -> None:
        self.config = config
        self.task = task
        self.sampler = sampler
        self.accelerator = accelerator
        limits = Limits.of(config.rollout, sampler.context)
        self.player = None if task.host is None else Player(sampler, task.host, limits)
        self.held_out = task.held_out_problems(config.eval.num_problems) if config.eval.num_problems else []
        self.next_problem = 0  # index of the next training problem
        self.measured: Measured = {}  # empty without rollout.band
        self._names: list[str] | None = None  # names of the rewards; empty if there are no names, None before the first grade
        self._has_warned = False  # whether a failed grading has been logged
        self._failed: list[float] = []  # share of responses whose grading failed, for each round of a step
        self._queue: deque[Ahead] = deque()
        self._loaded = -1  # version of the sampler's weights, in optimizer steps; -1 if unknown
        self._has_failed = False  # whether sampling a queued batch failed, in which case the batches after it are skipped
        num_threads = config.rollout.max_staleness if sampler.in_flight else 1
        self._thread = ThreadPoolExecutor(num_threads, thread_name_prefix="sampler")

    def take(self, step: int, newest: Callable[[], int]) -> Sampled:
        """Return the batch of one step, which consists of ``num_prompts`` groups of ``group_size`` rollouts.

        Args:
            step: number of the step, starting at 1.
            newest: gives the sampler the newest weights and returns their version in optimizer steps. It is called before any
                sampling outside the queue, that is, without a queue and for the extra rounds of dynamic sampling.
        """
        settings, self._failed = self.config.rollout, []
        sampled = collect(lambda turn: self._round(step, turn, newest), settings.num_prompts, settings.dynamic_sampling)
        return replace(sampled, failed=fmean(self._failed))

    def look_ahead(self, step: int, version: int, weights: Weights) -> None:
        """Fill the queue with the batches of the steps after this one and start sampling them in the background.

        Args:
            step: number of the current step, whose batch has been taken.
            version: version of the current weights, in optimizer steps.
            weights: returns the current weights, which are copied to CPU memory if older batches are still being sampled.
        """
        settings = self.config.rollout
        while len(self._queue) < min(settings.max_staleness, self.config.steps - step):
            later = step + len(self._queue) + 1
            self._queue.append(Ahead(later, *self._next_problems(later)))
        waiting = [place for place, batch in enumerate(self._queue) if batch.rollouts is None]
        if not waiting:
            return
        copied: dict[str, Tensor] | None = None
        if len(waiting) == len(self._queue) or self.sampler.in_flight:
            self.update_weights(version, weights)
        elif self.sampler.needs_weights:
            copied = {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights()}
        for place in waiting:
            batch = self._queue[place]
            self._queue[place] = replace(batch, rollouts=self._thread.submit(self._sample_ahead, batch, version, copied))

    def update_weights(self, version: int, weights: Weights) -> None:
        """Replace the sampler's weights, unless they already have this version.

        The method first waits for background sampling to end, unless the sampler can change its weights while it samples.
        """
        if not self.sampler.in_flight:
            self.settle()
        if self.sampler.needs_weights and version != self._loaded:
            self._load(version, weights())

    def settle(self) -> None:
        """Wait for background sampling to end. If sampling a batch failed, `take` raises the error when it needs the batch."""
        wait([batch.rollouts for batch in self._queue if batch.rollouts is not None])

    def forget_ahead(self) -> None:
        """Drop all responses that were sampled ahead. New ones are sampled for the same problems with different weights."""
        for batch in self._queue:
            if batch.rollouts is not None:
                batch.rollouts.cancel()
        self.settle()
        self._queue = deque(replace(batch, rollouts=None) for batch in self._queue)
        self._has_failed, self._loaded = False, -1

    def queued(self) -> list[QueuedBatch]:
        """Wait for the queued batches and return them with the rollouts of all processes. A failed batch has no rollouts."""
        batches = []
        for batch in self._queue:
            sampled_here = batch.rollouts.result() if batch.rollouts is not None and batch.is_sampled else None
            shares = gather(self.accelerator, [sampled_here])
            rollouts = None if None in shares else [rollout for share in shares for rollout in share or ()]
            batches.append(QueuedBatch(batch.indices, rollouts))
        return batches

    def restore(self, step: int, next_problem: int, queue: list[QueuedBatch], measured: Measured) -> None:
        """Restore the next problem, the queue and the measured rewards from a checkpoint that was saved after ``step``."""
        number, size = self.config.rollout.num_prompts, self.config.rollout.group_size
        self.next_problem, self.measured = next_problem, measured
        start, end = self._share(number)
        for place, saved in enumerate(queue, start=1):
            rollouts: Future[list[Rollout]] | None = None
            if saved.rollouts is not None:
                rollouts = Future()
                rollouts.set_result(saved.rollouts[start * size : end * size])
            problems = [problem for index in saved.indices for problem in self.task.train_problems(index, 1)]
            self._queue.append(Ahead(step + place, saved.indices, problems, rollouts))

    def position(self) -> tuple[int, tuple[Ahead, ...], Measured]:
        """Return the next problem's index, the queue and the measured rewards for `go_back`."""
        return self.next_problem, tuple(self._queue), dict(self.measured)

    def go_back(self, position: tuple[int, tuple[Ahead, ...], Measured]) -> None:
        """Go back to an earlier `position`. Queued batches whose sampling failed are sampled again."""
        self.next_problem, queue, self.measured = position
        self._queue = deque(batch if batch.is_sampled else replace(batch, rollouts=None) for batch in queue)
        self._has_failed = False

    def evaluate(self, newest: Callable[[], int]) -> tuple[dict[str, float], list[list[float | None]]]:
        """Return the metrics of an evaluation and all rewards by problem. Both are empty if ``eval.num_problems`` is 0.

        The metrics are the mean reward on held-out problems and its sampling error.

        Responses without a grade are left out, and ``eval/failed`` is their share. All evaluations with the same ``seed`` use
        the same random numbers, at every step and for every rule. Runs with different seeds use different random numbers, so
        the spread across seeds includes the sampling error.

        Args:
            newest: see `take`.
        """
        if not self.held_out:
            return {}, []
        settings, version = self.config.eval, newest()
        how = {"seed": step_seed(self.config.seed, EVALUATION, 0), "policy_version": version}
        groups = self.answer(self.held_out, settings.num_samples, temperature=settings.temperature, **how)
        answered = [group.graded for group in groups if group.graded]
        number = len(groups) * settings.num_samples
        means = {"eval/failed": (number - sum(map(len, answered))) / number}
        for name in self._names or () if answered else ():
            means[f"eval/parts/{name}"] = fmean(fmean(one.reward_parts[name] for one in graded) for graded in answered)
        rewards = [torch.tensor([one.reward for one in graded], dtype=torch.float64) for graded in answered]
        return means | sampled_mean(rewards), [[one.reward for one in group.rollouts] for group in groups]

    def answer(self, problems: list[Problem], samples: int, *, first_row: int = 0, **how: Any) -> list[RolloutGroup]:
        """Return ``samples`` graded responses to each problem. ``how`` holds other arguments of `Sampler.sample`."""
        return self._graded(problems, self._sample(problems, samples, first_row=first_row, **how), samples)

    def close(self) -> None:
        """Stop background sampling and close the sampler."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self.sampler.close()

    def _round(self, step: int, turn: int, newest: Callable[[], int]) -> list[RolloutGroup]:
        """Return graded responses to the next training problems. Each round of a step has its own random seed."""
        batch = self._queue.popleft() if turn == 0 and self._queue else None
        problems = self._next_problems(step)[1] if batch is None else batch.problems
        if batch is not None and batch.rollouts is not None:
            rollouts = batch.rollouts.result()
        else:
            rollouts = self._train_rollouts(problems, step, turn, newest())
        groups = self._graded(problems, rollouts, self.config.rollout.group_size)
        if self.config.rollout.band is not None:
            rewards = {group.problem.question: [one.reward or 0.0 for one in group.graded] for group in groups}
            self.measured |= {question: (fmean(graded), step) for question, graded in rewards.items() if graded}
        return groups

    def _next_problems(self, step: int) -> tuple[list[int], list[Problem]]:
        """Return the indices and the problems of the next training batch, which is the batch for the given step."""
        first, settings = self.next_problem, self.config.rollout
        size = self.task.num_problems(held_out=False) if settings.band is not None else None
        problems = self.task.train_problems(first, 2 * size if size else settings.num_prompts)  # two epochs hold every problem
        places = choose(problems, self.measured, step, settings) if size else range(settings.num_prompts)
        self.next_problem += max(places) + 1
        return [first + place for place in places], [problems[place] for place in places]

    def _load(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._loaded = -1  # after a failure, the sampler's weights are unknown
        self.sampler.update_weights(weights, version)
        self._loaded = version

    def _sample_ahead(self, batch: Ahead, version: int, weights: dict[str, Tensor] | None) -> list[Rollout]:
        """Sample a queued batch in the background thread. If sampling fails, the batches after it are skipped."""
        if self._has_failed:
            raise CancelledError
        try:
            if weights is not None and version != self._loaded:
                self._load(version, weights.items())
            return self._train_rollouts(batch.problems, batch.step, 0, version)
        except BaseException:
            self._has_failed = True
            raise

    def _train_rollouts(self, problems: list[Problem], step: int, turn: int, version: int) -> list[Rollout]:
        settings = self.config.rollout
        how = {"seed": step_seed(self.config.seed, ROLLOUT, step, turn), "policy_version": version}
        truncation = Truncation.of(settings.top_p, settings.top_k)
        return self._sample(problems, settings.group_size, temperature=settings.temperature, truncation=truncation, **how)

    def _sample(self, problems: list[Problem], samples: int, *, first_row: int = 0, **how: Any) -> list[Rollout]:
        """Return the responses to this process's share of the problems. ``how`` holds other arguments of `Sampler.sample`."""
        start, end = self._share(len(problems))
        how["first_row"] = first_row + start * samples
        if self.player is not None:
            asked = [problem for problem in problems[start:end] for _ in range(samples)]
            seeds = [self.task.episode_seed(problem) for problem in asked]
            with self.accelerator.autocast():
                return self.player.play(asked, seeds, **how)
        prompts = [self.task.prompt(problem) for problem in problems[start:end]]
        with self.accelerator.autocast():
            return self.sampler.sample(prompts, samples, **how)

    def _graded(self, problems: list[Problem], rollouts: list[Rollout], samples: int) -> list[RolloutGroup]:
        """Return the groups from all processes, in the order of the problems."""
        start, end = self._share(len(problems))
        if self.player is not None:  # the environments have set the rewards
            reasons = [rollout.failure for rollout in rollouts if rollout.failure]
        else:
            asked = [problem for problem in problems[start:end] for _ in range(samples)]
            rollouts, reasons = self._graded_here(asked, rollouts)
        groups = [
            RolloutGroup(problem, tuple(rollouts[index * samples : (index + 1) * samples]))
            for index, problem in enumerate(problems[start:end])
        ]
        self._check_failed(reasons, len(problems) * samples)
        return self._named(gather(self.accelerator, groups))

    def _named(self, groups: list[RolloutGroup]) -> list[RolloutGroup]:
        """Check that all grades have the same names, and return the groups with the names that the estimator compares."""
        if self.player is not None:
            return groups
        task, weights, estimator = f"task {self.task.name!r}", self.config.reward.weights, self.config.estimator
        is_needed = "reward_parts" in estimator.needs
        for names in (list(one.reward_parts) for group in groups for one in group.graded):
            if self._names is None:
                if unknown := sorted(weights.keys() - set(names)):
                    known = f"names: {', '.join(names)}" if names else "its rewards have no names"
                    hint = did_you_mean(unknown[0], names)
                    raise RunError(f"reward.weights={weights}: {task} has no reward named {unknown[0]!r} ({known}){hint}")
                if is_needed and not names:
                    raise RunError(
                        f"advantage {estimator.name!r} needs named rewards, but {task} returned a number; return a mapping "
                        "from names to numbers (task.reward), or choose another clip.advantage"
                    )
                self._names = names
            if names != self._names:
                first, other = (", ".join(each) or "no names" for each in (self._names, names))
                raise RunError(
                    f"{task} returned rewards with {first} for one response and with {other} for another; return the same "
                    "names for every response"
                )
        compared = tuple(name for name in self._names or () if weights.get(name, 1.0))
        return [replace(group, compared=compared) for group in groups] if is_needed else groups

    def _graded_here(self, asked: list[Problem], rollouts: list[Rollout]) -> tuple[list[Rollout], list[str]]:
        """Return the responses with their rewards, and a reason for each response whose grading failed.

        A grader stores only the reason for its last failure, so the reasons may repeat.
        """
        before = self._num_failed()
        rewards = self._rewards(asked, rollouts)
        failed = max(self._num_failed() - before, [reward for reward, _ in rewards].count(None))
        graded = [
            replace(rollout, reward=reward, reward_parts=parts)
            for rollout, (reward, parts) in zip(rollouts, rewards, strict=True)
        ]
        return graded, [self.task.last_failure] * failed

    def _rewards(self, asked: list[Problem], rollouts: list[Rollout]) -> list[tuple[float | None, dict[str, float]]]:
        """Return one reward per response, together with the named rewards. Raise RunError if a user's task fails."""
        named = f"task {self.task.name!r}"
        try:
            answers = self.task.grade(asked, [rollout.text for rollout in rollouts])
            rewards = [self._weighted(answer) for answer in answers]
        except (UserError, RunError, MemoryError):
            raise
        except Exception as error:
            raise RunError(f"{named} failed to grade: {located(error)}") from error
        if len(rewards) != len(rollouts):
            raise RunError(f"{named} returned {len(rewards)} rewards for {len(rollouts)} responses")
        return rewards

    def _weighted(self, grade: object) -> tuple[float | None, dict[str, float]]:
        """Return a grade as one reward, which is the weighted sum of any named rewards, together with the named rewards."""
        if grade is None or not isinstance(grade := checked_grade(grade), Mapping):
            return grade, {}
        weights = self.config.reward.weights
        parts = dict(sorted(grade.items()))
        return checked_reward(sum(weights.get(name, 1.0) * part for name, part in parts.items())), parts

    def _num_failed(self) -> int:
        return sum(grader.num_failures for grader in self.task.graders)

    def _check_failed(self, reasons: list[str], number: int) -> None:
        """Record the share of failures across all processes and end the run if too many have failed.

        Args:
            reasons: one reason for each failure in this process.
            number: number of responses across all processes.
        """
        failures = gather(self.accelerator, reasons)
        self._failed.append(len(failures) / number)
        limit, what = self.config.reward.max_failed, "the environment" if self.player is not None else "grading"
        if len(failures) / number > limit:
            raise RunError(
                f"{what} failed for {len(failures)} of {number} responses (reward.max_failed={limit:g}); "
                f"the last failure: {failures[-1]}"
            )
        if failures and (self.player is not None or not self._has_warned):  # of failed gradings, only the first
            noun, self._has_warned = "environments" if self.player is not None else "gradings", True
            logger.warning("%d of %d %s failed; the last failure: %s", len(failures), number, noun, failures[-1])

    def _share(self, number: int) -> tuple[int, int]:
        """Return the start and end indices of this process's share of the problems."""
        index, processes = self.accelerator.process_index, self.accelerator.num_processes
        return number * index // processes, number * (index + 1) // processes


def sampled_mean(rewards: Sequence[Tensor] | Tensor) -> dict[str, float]:
    """Return the mean over problems of their mean rewards, and its standard error due to sampling, with the problems fixed.

    Args:
        rewards: the rewards of each problem, ``(samples,)``. If a problem has a single sample, its variance is unknown, so
            the larger variance over all rewards is used instead. Without problems, the result is empty.

    Example:
        The rewards of two problems are 1, 0 and 1, 1. The variances of the two mean rewards are 1/4 and 0.
        The average of these means therefore has variance 1/16, whose square root is 1/4:

        >>> sampled_mean([torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])])
        {'eval/accuracy': 0.75, 'eval/accuracy_se': 0.25}
    """
    if len(rewards) == 0:
        return {}
    overall = torch.cat(list(rewards)).var(correction=0)
    variances = [(values.var() if len(values) > 1 else overall) / len(values) for values in rewards]
    mean = float(torch.stack([values.mean() for values in rewards]).mean())
    return {"eval/accuracy": mean, "eval/accuracy_se": float(torch.stack(variances).sum().sqrt()) / len(rewards)}
