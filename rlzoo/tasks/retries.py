"""Gives the model several tries at each problem of any single-turn task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from pydantic import Field

from rlzoo.environments import Environment, Host
from rlzoo.environments.retries import Retries
from rlzoo.errors import UserError
from rlzoo.support.workers import Worker
from rlzoo.tasks.episodes import EpisodeTask
from rlzoo.tasks.task import Origin, Task, build_task
from rlzoo.types import Problem


class RetriesTask(EpisodeTask):
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

    def model_post_init(self, context: Any) -> None:
        """Build the other task, so that an error in its settings is reported before a run starts."""
        for field in ("reward", "template"):
            if getattr(self, field) != type(self).model_fields[field].default:
                raise UserError(
                    f"task.{field}: the other task asks the questions and grades the answers; set task.inner.{field} instead"
                )
        super().model_post_init(context)
        if self.task.host is not None:
            raise UserError(f"task.inner.name={self.task.name!r}: this is already a multi-turn task; choose a single-turn task")

    @cached_property
    def task(self) -> Task:
        """The task that provides the problems and grades the answers."""
        return build_task({"seed": self.seed, **self.inner})

    @property
    def make(self) -> Callable[[], Environment]:
        """See `EpisodeTask.make`."""
        return self._environment

    @cached_property
    def host(self) -> Host:
        """See `Task.host`."""
        return Host(self.make, workers=0, timeout=self.timeout)

    @property
    def graders(self) -> list[Worker]:
        """The other task's graders."""
        return self.task.graders

    def train_problems(self, start: int, count: int) -> list[Problem]:
        """Return the other task's training problems."""
        return self.task.train_problems(start, count)

    def held_out_problems(self, count: int) -> list[Problem]:
        """Return the other task's held-out problems."""
        return self.task.held_out_problems(count)

    def prompts(self, problems: Sequence[Problem]) -> list[str]:
        """Return the other task's prompts."""
        return self.task.prompts(problems)

    def origin(self, *, held_out: bool) -> Origin:
        """Return the origin of the other task's problems."""
        return self.task.origin(held_out=held_out)

    def close(self) -> None:
        """Stop the other task's worker processes."""
        super().close()
        self.task.close()

    def _environment(self) -> Retries:
        return Retries(
            self._graded, self.task.prompt, tries=self.tries, again=self.again, discount=self.discount, solved=self.solved
        )

    def _graded(self, problem: Problem, answer: str) -> float:
        grade = self.task.grade([problem], [answer])[0]
        if grade is None:
            raise ValueError(f"grading failed: {self.task.last_failure}")  # the episode fails
        return grade
