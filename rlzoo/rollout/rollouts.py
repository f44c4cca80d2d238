"""Samples and grades groups of rollouts, divided among processes and optionally one batch ahead."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlzoo.config.run_config import RunConfig
from rlzoo.errors import RunError, UserError
from rlzoo.processes import gather
from rlzoo.rollout.episodes import Limits, Player
from rlzoo.rollout.sampler import Sampler
from rlzoo.support.draws import Truncation
from rlzoo.support.seeds import EVALUATION, ROLLOUT, step_seed
from rlzoo.tasks import Task
from rlzoo.tasks.grading import checked_reward
from rlzoo.types import Problem, Rollout, RolloutGroup

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger("rlzoo")


@dataclass(frozen=True, slots=True)
class Sampled:
    """The groups of one step, with statistics of how they were sampled."""

    groups: list[RolloutGroup]
    num_rounds: int  # rounds of sampling
    num_dropped: int  # groups with equal rewards that were dropped
    failed: float = 0.0  # share of all sampled responses whose grading failed


def collect(sample_round: Callable[[int], list[RolloutGroup]], num_groups: int, extra_rounds: int) -> Sampled:
    """Sample until ``num_groups`` groups have rewards that differ (dynamic sampling, arXiv 2503.14476).

    If there are too few such groups, groups with equal rewards complete the batch. Minibatches therefore have the same size,
    and the same gradient noise, when the task is too easy or too hard.

    Args:
        sample_round: returns ``num_groups`` graded groups for new prompts; called with 0, 1, ...
        num_groups: size of the batch, in groups.
        extra_rounds: maximum number of rounds after the first; with 0 the batch is the first round, whatever its rewards.
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
    """A round of sampling that runs in the background."""

    problems: list[Problem]  # those of all processes
    rollouts: Future[list[Rollout]]  # those of this process


class Rollouts:
    """Samples and grades the batches of a run; every process gets the same results."""

    def __init__(self, config: RunConfig, task: Task, sampler: Sampler, accelerator: Accelerator) -> None:
        self.config = config
        self.task = task
        self.sampler = sampler
        self.accelerator = accelerator
        limits = Limits.of(config.rollout, sampler.context)
        self.player = None if task.host is None else Player(sampler, task.host, limits)
        self.held_out = task.held_out_problems(config.eval.num_problems) if config.eval.num_problems else []
        self.next_problem = 0  # number of training problems sampled so far, including dropped ones
        self._failed: list[float] = []  # share of responses whose grading failed, for each round of a step
        self._ahead: Ahead | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sampler")

    def take(self, step: int, version: int) -> Sampled:
        """Return the batch of one step: ``num_prompts`` groups of ``group_size`` rollouts.

        Args:
            step: number of the step, starting at 1.
            version: number of optimizer steps behind the sampler's weights.
        """
        settings, self._failed = self.config.rollout, []
        sampled = collect(lambda turn: self._round(step, turn, version), settings.num_prompts, settings.dynamic_sampling)
        return replace(sampled, failed=fmean(self._failed))

    def look_ahead(self, step: int, version: int) -> None:
        """Start sampling a later step's batch in the background."""
        problems = self._next_problems()
        self._ahead = Ahead(problems, self._thread.submit(self._train_rollouts, problems, step, 0, version))

    def settle(self) -> None:
        """Wait for background sampling to end, so that the sampler's weights can be changed."""
        if self._ahead is not None:
            self._ahead.rollouts.result()

    def forget_ahead(self) -> None:
        """Drop the batch that was sampled ahead; its problems are sampled again."""
        if self._ahead is not None:
            self._ahead.rollouts.exception()  # waits for the sampling
            self.next_problem, self._ahead = self.next_problem - len(self._ahead.problems), None

    def sampled_ahead(self) -> list[Rollout] | None:
        """Wait for the batch that is sampled ahead, and return its rollouts from all processes; None if there is none."""
        return None if self._ahead is None else gather(self.accelerator, self._ahead.rollouts.result())

    def restore(self, next_problem: int, ahead: list[Rollout] | None) -> None:
        """Restore the position of a checkpoint."""
        number, size = self.config.rollout.num_prompts, self.config.rollout.group_size
        self.next_problem = next_problem
        if ahead is not None:
            problems = self.task.train_problems(next_problem - number, number)
            start, end = self._share(number)
            own = ahead[start * size : end * size]
            self._ahead = Ahead(problems, self._thread.submit(lambda: own))

    def position(self) -> tuple[int, Ahead | None]:
        """Return the current position, for `go_back`."""
        return self.next_problem, self._ahead

    def go_back(self, position: tuple[int, Ahead | None]) -> None:
        """Return to a position; a batch whose sampling ahead failed is sampled again."""
        self.next_problem, self._ahead = position
        if self._ahead is not None and self._ahead.rollouts.exception() is not None:
            self.forget_ahead()

    def evaluate(self, version: int) -> dict[str, float]:
        """Return the mean reward on held-out problems and its sampling error; empty if ``eval.num_problems`` is 0.

        All evaluations with the same ``seed`` use the same random numbers, in every step and for every rule. Other seeds use
        other random numbers, so that the spread over seeds includes the sampling error.
        """
        if not self.held_out:
            return {}
        self.settle()
        settings, seed = self.config.eval, step_seed(self.config.seed, EVALUATION, 0)
        rollouts = self._sample(self.held_out, settings.num_samples, settings.temperature, seed, version)
        groups = self._graded(self.held_out, rollouts, settings.num_samples)
        rewards = torch.tensor([[rollout.reward for rollout in group.rollouts] for group in groups], dtype=torch.float64)
        return {"eval/accuracy": float(rewards.mean()), "eval/accuracy_se": sampling_error(rewards)}

    def close(self) -> None:
        """Stop background sampling and close the sampler."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self.sampler.close()

    def _round(self, step: int, turn: int, version: int) -> list[RolloutGroup]:
        """Return graded responses to the next training problems; each round of a step has its own random seed."""
        if turn == 0 and self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            problems, rollouts = ahead.problems, ahead.rollouts.result()
        else:
            problems = self._next_problems()
            rollouts = self._train_rollouts(problems, step, turn, version)
        return self._graded(problems, rollouts, self.config.rollout.group_size)

    def _next_problems(self) -> list[Problem]:
        number = self.config.rollout.num_prompts
        problems = self.task.train_problems(self.next_problem, number)
        self.next_problem += number
        return problems

    def _train_rollouts(self, problems: list[Problem], step: int, turn: int, version: int) -> list[Rollout]:
        settings = self.config.rollout
        seed = step_seed(self.config.seed, ROLLOUT, step, turn)
        truncation = Truncation.of(settings.top_p, settings.top_k)
        return self._sample(problems, settings.group_size, settings.temperature, seed, version, truncation)

    def _sample(
        self,
        problems: list[Problem],
        samples: int,
        temperature: float,
        seed: int,
        version: int,
        truncation: Truncation | None = None,
    ) -> list[Rollout]:
        """Return the responses to this process's share of the problems."""
        how: dict[str, Any] = {"seed": seed, "temperature": temperature, "truncation": truncation, "policy_version": version}
        start, end = self._share(len(problems))
        if self.player is not None:
            asked = [problem for problem in problems[start:end] for _ in range(samples)]
            seeds = [self.task.episode_seed(problem) for problem in asked]
            with self.accelerator.autocast():
                return self.player.play(asked, seeds, first_row=start * samples, **how)
        prompts = [self.task.prompt(problem) for problem in problems[start:end]]
        with self.accelerator.autocast():
            return self.sampler.sample(prompts, samples, first_row=start * samples, **how)

    def _graded(self, problems: list[Problem], rollouts: list[Rollout], samples: int) -> list[RolloutGroup]:
        """Return the groups of all processes, in the order of the problems."""
        start, end = self._share(len(problems))
        own = problems[start:end]
        if self.player is not None:
            graded = rollouts  # the environments have set the rewards
            reasons = [rollout.failure for rollout in rollouts if rollout.failure]
        else:
            graded, reasons = self._graded_here([problem for problem in own for _ in range(samples)], rollouts)
        groups = [
            RolloutGroup(problem, tuple(graded[index * samples : (index + 1) * samples])) for index, problem in enumerate(own)
        ]
        self._check_failed(reasons, len(problems) * samples)
        return gather(self.accelerator, groups)

    def _graded_here(self, asked: list[Problem], rollouts: list[Rollout]) -> tuple[list[Rollout], list[str]]:
        """Return responses with rewards, and a reason for each failed grading; only each grader's last reason is known."""
        before = self._num_failed()
        rewards = self._rewards(asked, rollouts)
        failed = self._num_failed() - before
        reasons = [grader.last_failure for grader in self.task.graders if grader.last_failure]
        return (
            [replace(rollout, reward=reward) for rollout, reward in zip(rollouts, rewards, strict=True)],
            (reasons * failed)[:failed],
        )

    def _rewards(self, asked: list[Problem], rollouts: list[Rollout]) -> list[float]:
        """Return one reward per response; a user's own task grades in this process, so errors and the result are checked."""
        named = f"task {self.task.name!r}"
        try:
            given = self.task.grade(asked, [rollout.text for rollout in rollouts])
            rewards = [checked_reward(reward) for reward in given]
        except (UserError, RunError, MemoryError):
            raise
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{last.filename} line {last.lineno}"
            raise RunError(f"{named} failed to grade: {type(error).__name__}: {error} ({where})") from error
        if len(rewards) != len(rollouts):
            raise RunError(f"{named} returned {len(rewards)} rewards for {len(rollouts)} responses")
        return rewards

    def _num_failed(self) -> int:
        return sum(grader.num_timeouts + grader.num_crashes for grader in self.task.graders)

    def _check_failed(self, reasons: list[str], number: int) -> None:
        """Record the share of failures over all processes, and end the run if there are too many.

        Args:
            reasons: one reason for each failure in this process.
            number: number of responses in all processes.
        """
        failures = gather(self.accelerator, reasons)
        self._failed.append(len(failures) / number)
        limit, what = self.config.reward.max_failed, "the environment" if self.player is not None else "grading"
        if len(failures) / number > limit:
            raise RunError(
                f"{what} failed for {len(failures)} of {number} responses (reward.max_failed={limit:g}); "
                f"the last one: {failures[-1]}"
            )
        if self.player is not None and failures:
            logger.warning("%d of %d environments failed; the last one: %s", len(failures), number, failures[-1])

    def _share(self, number: int) -> tuple[int, int]:
        """Return the first and the end index of this process's share of the problems."""
        index, processes = self.accelerator.process_index, self.accelerator.num_processes
        return number * index // processes, number * (index + 1) // processes


def sampling_error(rewards: Tensor) -> float:
    """Return the standard error of a mean reward due to sampling, with the problems held fixed.

    Args:
        rewards: tensor ``(problems, samples)``. With one sample the variance within a problem is unknown. The variance of all
            rewards, which is larger, is used instead.

    Example:
        The rewards of two problems are 1, 0 and 1, 1. The variances of their means are 1/4 and 0. The variance of the mean of
        both is 1/16, and its root is 1/4:

        >>> sampling_error(torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
        0.25
    """
    problems, samples = rewards.shape
    if samples > 1:
        return float((rewards.var(1) / samples).sum().sqrt() / problems)
    return float(rewards.var(0, correction=0).sum().sqrt() / problems**0.5)
