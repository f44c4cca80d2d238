"""Multi-turn tasks, in which the model and an environment take turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Annotated, Any, ClassVar

from pydantic import Field

from rlzoo.core.errors import UserError
from rlzoo.tasks.environments import Environment, Host
from rlzoo.tasks.problem import Problem
from rlzoo.tasks.task import Task
from rlzoo.tasks.user_code import import_named

Workers = Annotated[
    int,
    Field(
        ge=0,
        le=256,
        description="number of processes for environments; 0 runs them in the training process, with no time or memory limits",
    ),
]
TRIED = 4
"""Number of episodes that are started before a run to find errors early."""


class EpisodeTask(Task):
    """Episodes in an environment. The fields hold the settings, and each problem starts an episode."""

    right_or_wrong = False
    no_effect: ClassVar = "an environment writes its own prompts and computes its own rewards; remove this setting"

    workers: Workers = 4
    timeout: float = Field(
        default=5.0,
        gt=0,
        le=3600,
        description="time limit in seconds for one call to an environment in a worker process; a timeout fails the episode",
    )

    def model_post_init(self, context: Any) -> None:
        """Reject the settings ``reward`` and ``template``, which would have no effect."""
        for field in ("reward", "template"):
            if getattr(self, field) != type(self).model_fields[field].default:
                raise UserError(f"task.{field}: {self.no_effect.format(field)}")
        super().model_post_init(context)

    @property
    def make(self) -> Callable[[], Environment]:
        """A callable that returns an environment for one episode. It must be importable by name."""
        raise NotImplementedError

    @cached_property
    def host(self) -> Host:
        """The host that runs the environments; see `Task.host`."""
        return Host(self.make, workers=self.workers, timeout=self.timeout)

    def train_problems(self, start: int, count: int) -> list[Problem]:
        """Return ``count`` training episodes, starting at index ``start``."""
        return [Problem(f"episode {self.seed}:{index}", "") for index in range(start, start + count)]

    def held_out_problems(self, count: int) -> list[Problem]:
        """Return episodes with seeds that training does not use."""
        return [Problem(f"held-out episode {index}", "") for index in range(count)]

    def prompts(self, problems: Sequence[Problem]) -> list[str]:
        """Start a few episodes and return their first prompts; raise a `UserError` if an episode cannot start."""
        some = problems[:TRIED]
        numbers, seen = self.host.begin(some, [self.episode_seed(problem) for problem in some])
        self.host.end(numbers)
        if failure := next((observation.failure for observation in seen if observation.failure), None):
            raise UserError(f"task {self.name!r}: cannot begin an episode: {failure.removeprefix('UserError: ')}")
        return ["".join(str(message["content"]) for message in observation.messages) for observation in seen]

    def close(self) -> None:
        """Stop the worker processes."""
        super().close()
        if "host" in self.__dict__:
            self.host.close()

    def _grade(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[float]:
        raise AssertionError("an environment computes its own rewards")


class EnvironmentTask(EpisodeTask):
    """Episodes in an environment that is provided by the user or a library."""

    environment: str = Field(
        min_length=1, description="class of the environment, or a function that returns an environment, as module:name"
    )
    arguments: dict[str, Any] = Field(default={}, description="keyword arguments for the environment's class or function")

    def model_post_init(self, context: Any) -> None:
        """Import the environment class or function, so that an import error is reported before a run starts."""
        super().model_post_init(context)
        key = f"task.environment={self.environment!r}"
        kind = import_named("task.environment", self.environment, "module:Class, for example my_game:Guess")
        missing = [name for name in ("reset", "step") if isinstance(kind, type) and not callable(getattr(kind, name, None))]
        if missing:
            raise UserError(f"{key}: has no method {missing[0]!r}; an environment needs reset(problem, seed) and step(message)")
        if not callable(kind):
            raise UserError(f"{key}: expected a class or a function, got an object of type {type(kind).__name__}")

    @property
    def make(self) -> Callable[[], Environment]:
        """See `EpisodeTask.make`."""
        return partial(make_environment, self.environment, self.arguments)


def make_environment(reference: str, arguments: dict[str, Any]) -> Environment:
    """Create the environment named by ``module:name`` with the given arguments."""
    environment: Environment = import_named("task.environment", reference, "module:Class")(**arguments)
    return environment
