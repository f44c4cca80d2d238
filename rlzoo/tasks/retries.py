"""Gives the model several tries at each problem of any single-turn task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from pydantic import Field

from rlzoo.tasks.environments import Environment, Messages
from rlzoo.tasks.episodes import AskingTask
from rlzoo.tasks.problem import Problem


class RetriesTask(AskingTask):
    """Problems from another task; after a wrong answer, the model may try again.

    The environment is lightweight and runs in the training process. The other task grades the answers, in its own worker
    process if grading could hang or crash.
    """

    inner: dict[str, Any] = Field(
        description="settings of the task that provides the problems and grades the answers, such as {name: arithmetic}"
    )
    tries: int = Field(default=3, ge=1, le=100, description="maximum number of answers to a problem")
    again: str = Field(
        default="That is wrong. Try again.", min_length=1, description="message to the model after a wrong answer"
    )
    discount: float = Field(default=1.0, ge=0, le=1, description="factor by which each earlier try multiplies the reward")
    solved: float = Field(default=1.0, description="minimum reward for an answer to count as right")
    workers: int = Field(default=0, ge=0, le=0, description="always 0: the environment runs in the training process")

    task_setting = "inner"

    @property
    def make(self) -> Callable[[], Environment]:
        """See `EpisodeTask.make`."""
        return partial(Retries, self)


class Retries:
    """Grades every turn; the episode ends with the first right answer, or with the last try.

    Example:
        >>> env = Retries(RetriesTask(inner={"name": "arithmetic"}, tries=2))
        >>> env.reset(Problem("1+1", "2"), seed=0)
        '1+1='
        >>> env.step("#3")
        ('That is wrong. Try again.', 0.0, False, {'tries': 1, 'solved': False, 'state': '1+1 1'})
        >>> env.step("#2")
        ('', 1.0, True, {'tries': 2, 'solved': True, 'state': '1+1 2'})
    """

    def __init__(self, task: RetriesTask) -> None:
        self.task = task

    def reset(self, problem: Problem, seed: int) -> Messages:
        """Return the problem's prompt; the seed is not used."""
        self._problem, self._tries = problem, 0
        return self.task.task.prompt(problem)

    def step(self, message: str) -> tuple[Messages, float, bool, Mapping[str, Any]]:
        """Grade an answer. Only the last answer earns a reward, so that extra tries alone gain nothing."""
        reward = self.task.task.grade([self._problem], [message])[0]
        if reward is None:
            raise ValueError(f"grading failed: {self.task.task.last_failure}")  # the episode fails
        solved = reward >= self.task.solved
        self._tries += 1
        done = solved or self._tries == self.task.tries
        paid = reward * self.task.discount ** (self._tries - 1) if done else 0.0
        state = f"{self._problem.question} {self._tries}"
        return "" if done else self.task.again, paid, done, {"tries": self._tries, "solved": solved, "state": state}
