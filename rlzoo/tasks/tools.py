"""Questions from another task, which the model may answer with the help of tools."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, ClassVar

from pydantic import Field

from rlzoo.core.errors import UserError, shown
from rlzoo.support.workers import Worker
from rlzoo.tasks.environments import Environment, Host, Observation
from rlzoo.tasks.environments.tools import Tool, ToolEnvironment, checked
from rlzoo.tasks.episodes import EpisodeTask
from rlzoo.tasks.problem import Problem
from rlzoo.tasks.task import Task, build_task, seeded
from rlzoo.tasks.user_code import import_named

FORM = "module:function, for example rlzoo.tasks.environments.tools:calculator"


class ToolTask(EpisodeTask):
    """Questions from another task. A turn may call tools. A turn without a call is the answer, which the other task grades."""

    no_effect: ClassVar = "this setting belongs to the task that asks; set task.problems.{} instead"

    problems: dict[str, Any] = Field(description="name and settings of the task that asks the questions and grades the answers")
    tools: list[str] = Field(min_length=1, max_length=64, description="functions that the model may call, as module:function")
    timeout: float = Field(
        default=60.0, gt=0, le=3600, description="time limit in seconds for all calls in a turn; a timeout ends the episode"
    )

    def model_post_init(self, context: Any) -> None:
        """Build the other task and import the tools so that their errors are reported before a run starts."""
        super().model_post_init(context)
        if self.task.host is not None:
            raise UserError(f"task.problems: task {self.task.name!r} is already a multi-turn task; choose a single-turn task")
        _ = self.schemas
        self.make()  # this call checks and prepares the tools

    @cached_property
    def task(self) -> Task:
        """The task that asks the questions and grades the answers. All copies of a `ToolTask` share it."""
        try:
            return build_task(self.problems)
        except UserError as error:
            raise UserError(f"task.problems: {error}") from error

    @cached_property
    def schemas(self) -> list[dict[str, Any]]:
        """The JSON schemas of the tools."""
        functions = [import_tool(reference) for reference in self.tools]
        names = [function.__name__ for function in functions]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UserError(f"task.tools: two tools are named {twice!r}; rename one, because the model calls tools by name")
        return [_schema(reference, function) for reference, function in zip(self.tools, functions, strict=True)]

    @property
    def right_or_wrong(self) -> bool:  # type: ignore[override]
        """Whether the other task's grades are 1 or 0."""
        return self.task.right_or_wrong and self.task.reward is None

    @property
    def make(self) -> Callable[[], Environment]:
        """See `EpisodeTask.make`."""
        return partial(make_environment, tuple(self.tools))

    @cached_property
    def host(self) -> Host:
        """The host that runs the tools; see `Task.host`."""
        return AskingHost(self)

    @property
    def graders(self) -> list[Worker]:
        """The other task's graders."""
        return self.task.graders

    def train_problems(self, start: int, count: int) -> list[Problem]:
        """Return the other task's training problems."""
        return seeded(self.task, self.seed).train_problems(start, count)

    def held_out_problems(self, count: int) -> list[Problem]:
        """Return the other task's held-out problems."""
        return self.task.held_out_problems(count)

    def prompts(self, problems: Sequence[Problem]) -> list[str]:
        """Start a few episodes and return the prompts of all problems."""
        super().prompts(problems)
        return self.task.prompts(problems)

    def num_problems(self, *, held_out: bool) -> int | None:
        """Return the number of the other task's problems."""
        return self.task.num_problems(held_out=held_out)

    def close(self) -> None:
        """Stop the other task's worker processes too."""
        super().close()
        self.task.close()


class AskingHost(Host):
    """A host whose episodes ask a task's questions. The task grades the final answers in this process.

    The processes that run the tools receive neither the reference answers nor the grader.
    """

    def __init__(self, task: ToolTask) -> None:
        super().__init__(task.make, workers=task.workers, timeout=task.timeout)
        self.tools, self.task = tuple(task.schemas), task.task
        self._asked: dict[int, Problem] = {}

    def begin(self, problems: Sequence[Problem], seeds: Sequence[int]) -> tuple[list[int], list[Observation]]:
        """See `Host.begin`."""
        numbers, seen = super().begin([Problem(self.task.prompt(problem), "") for problem in problems], seeds)
        self._asked.update(zip(numbers, problems, strict=True))
        return numbers, seen

    def step(self, messages: Mapping[int, str]) -> list[Observation]:
        """See `Host.step`. The last turn's reward is the grade of the answer."""
        seen = dict(zip(messages, super().step(messages), strict=True))
        final = [number for number, observation in seen.items() if observation.done and not observation.failure]
        grades = self.task.grade([self._asked[number] for number in final], [messages[number] for number in final])
        for number, grade in zip(final, grades, strict=True):
            if isinstance(grade, Mapping):
                raise UserError(f"task {self.task.name!r} returned {shown(grade)}; the reward of an episode is one number")
            failure = f"grading failed: {self.task.last_failure}"
            seen[number] = replace(seen[number], **({"failure": failure} if grade is None else {"reward": grade}))
        return list(seen.values())

    def end(self, numbers: Sequence[int]) -> None:
        """See `Host.end`."""
        super().end(numbers)
        for number in numbers:
            self._asked.pop(number, None)


def make_environment(references: Sequence[str]) -> Environment:
    """Return an environment in which the model may call the given functions, each named as ``module:function``."""
    return ToolEnvironment([import_tool(reference) for reference in references])


def import_tool(reference: str) -> Tool:
    """Return the function named by ``module:function``. The module may be in the current directory.

    Raises:
        UserError: the name is not found or does not refer to a function.
    """
    tool = import_named("task.tools", reference, FORM)
    key = f"task.tools={shown(reference)}"
    if not inspect.isfunction(tool):
        raise UserError(f"{key}: expected a function, got an object of type {type(tool).__name__}")
    return tool


def _schema(reference: str, tool: Tool) -> dict[str, Any]:
    """Return the JSON schema of a function, derived from its annotations and docstring."""
    from transformers.utils import get_json_schema

    try:
        schema: dict[str, Any] = get_json_schema(tool)
        checked(tool)
    except Exception as error:  # transformers raises several kinds of errors
        reason = " ".join(str(error).split())
        raise UserError(
            f"task.tools={shown(reference)}: a tool needs a docstring with an 'Args:' section and an annotation for every "
            f"argument, from which its schema is generated: {reason[:300]}"
        ) from error
    schema["function"].pop("return", None)
    return schema
