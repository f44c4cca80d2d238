"""A task that is played: the model and an environment write in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

from pydantic import Field

from rlzoo.environments import Environment, Host
from rlzoo.errors import UserError
from rlzoo.tasks.task import Task
from rlzoo.tasks.user_code import import_named
from rlzoo.types import Problem

TRIED = 4
"""Episodes that are begun before a run starts."""


class EpisodeTask(Task):
    """Episodes of an environment: the settings are the fields, and each problem begins an episode."""

    workers: int = Field(
        default=4, ge=0, le=256, description="processes for environments; 0: in the process that trains, without limits"
    )
    timeout: float = Field(
        default=5.0,
        gt=0,
        le=3600,
        description="seconds for one call of an environment in a worker process; longer fails the episode",
    )

    def model_post_init(self, context: Any) -> None:
        """Refuse a reward function and a template, which nothing would use."""
        if self.reward is not None:
            raise UserError("task.reward: an environment pays its rewards itself; leave it out")
        if self.template != type(self).model_fields["template"].default:
            raise UserError("task.template: an environment asks the model itself; leave it out")
        super().model_post_init(context)

    @property
    def make(self) -> Callable[[], Environment]:
        """What gives an environment for one episode; importable by name."""
        raise NotImplementedError

    @cached_property
    def host(self) -> Host:
        """What runs the environments; see `Task.host`."""
        return Host(self.make, workers=self.workers, timeout=self.timeout)

    def train_problems(self, start: int, count: int) -> list[Problem]:
        """Training episodes ``start`` to ``start + count``."""
        return [Problem(f"episode {self.seed}:{index}", "") for index in range(start, start + count)]

    def held_out_problems(self, count: int) -> list[Problem]:
        """Episodes with seeds of their own."""
        return [Problem(f"held-out episode {index}", "") for index in range(count)]

    def prompts(self, problems: Sequence[Problem]) -> list[str]:
        """Begin a few episodes; a `UserError` if one fails."""
        some = problems[:TRIED]
        numbers, seen = self.host.begin(some, [self.episode_seed(problem) for problem in some])
        self.host.end(numbers)
        if failure := next((each.failure for each in seen if each.failure), None):
            raise UserError(f"task {self.name!r}: an episode does not begin: {failure.removeprefix('UserError: ')}")
        return ["".join(str(message["content"]) for message in each.messages) for each in seen]

    def close(self) -> None:
        """End the worker processes."""
        super().close()
        if "host" in self.__dict__:
            self.host.close()

    def _grade(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[float]:
        raise AssertionError("an environment pays its rewards itself")


class EnvironmentTask(EpisodeTask):
    """An environment of the user's own, or of a library."""

    environment: str = Field(min_length=1, description="the environment's class, or a function that makes one, as module:name")
    arguments: dict[str, Any] = Field(default={}, description="what it is called with, by name")

    def model_post_init(self, context: Any) -> None:
        """Import the environment and make one, so that a mistake shows before a run starts."""
        super().model_post_init(context)
        key = f"task.environment={self.environment!r}"
        made = import_named("task.environment", self.environment, "module:Class, for example my_game:Guess")
        missing = [name for name in ("reset", "step") if isinstance(made, type) and not callable(getattr(made, name, None))]
        if missing:
            raise UserError(f"{key}: has no method {missing[0]!r}; an environment has reset(problem, seed) and step(message)")
        if not callable(made):
            raise UserError(f"{key}: is of type {type(made).__name__}, not a class or a function")

    @property
    def make(self) -> Callable[[], Environment]:
        """See `EpisodeTask.make`."""
        return partial(make_environment, self.environment, self.arguments)


def make_environment(reference: str, arguments: dict[str, Any]) -> Environment:
    """Make an environment from ``module:name`` and its arguments."""
    environment: Environment = import_named("task.environment", reference, "module:Class")(**arguments)
    return environment
