"""Gives the model several tries at each problem of any single-turn task."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from pydantic import Field

from rlzoo.environments import Environment
from rlzoo.environments.retries import Retries
from rlzoo.tasks.episodes import AskingTask
from rlzoo.types import Problem


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
        settings = self.model_dump(include={"tries", "again", "discount", "solved"})
        return partial(Retries, self._graded, self.task.prompt, **settings)

    def _graded(self, problem: Problem, answer: str) -> float:
        grade = self.task.grade([problem], [answer])[0]
        if grade is None:
            raise ValueError(f"grading failed: {self.task.last_failure}")  # the episode fails
        return grade
