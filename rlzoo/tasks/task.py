"""A task: prompts without end for training, other ones for evaluation, and a grade for every response."""

from __future__ import annotations

import hashlib
import importlib
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from rlzoo.errors import UserError, did_you_mean, explain, shown
from rlzoo.tasks.grading import Grader
from rlzoo.tasks.user_code import import_named, import_reward, reward_worker
from rlzoo.types import Problem

if TYPE_CHECKING:
    from rlzoo.environments import Host

_TASKS = {
    "arithmetic": ("rlzoo.tasks.arithmetic", "ArithmeticTask"),
    "math_file": ("rlzoo.tasks.math_file", "MathFileTask"),
    "environment": ("rlzoo.tasks.episodes", "EnvironmentTask"),
    "guess": ("rlzoo.tasks.guess", "GuessTask"),
    "reasoning_gym": ("rlzoo.tasks.reasoning_gym", "ReasoningGymTask"),
    "recurrence": ("rlzoo.tasks.recurrence", "RecurrenceTask"),
    "retries": ("rlzoo.tasks.retries", "RetriesTask"),
    "tools": ("rlzoo.tasks.tools", "ToolTask"),
}
_OWN = "<module>:<Class>"
_FINGERPRINTED = 256  # problems
_HELD_OUT_SHARE = 8  # one question in eight is kept for evaluation


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a task's problems come from.

    Example:
        ``Origin("openai/gsm8k", split="train", size=7473)``; ``Origin()`` of problems that are generated without end.
    """

    path: str | None = None  # a file, or a data set on the hub; None if they are generated
    is_file: bool = False
    subset: str | None = None
    split: str | None = None
    size: int | None = None  # None: no end


class Task(BaseModel, ABC):
    """Prompts with verifiable rewards: the settings are the fields, the behaviour is the methods.

    ``build_task({"name": task.name, **task.model_dump()})`` gives an equal task.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    template: str = Field(default="{question}", description="the prompt, with {question} where the question goes")
    reward: str | None = Field(
        default=None,
        min_length=1,
        description="your own reward as module:function, called with (problem, response); none: the task's own",
    )
    timeout: float = Field(
        default=5.0, gt=0, le=3600, description="seconds to grade one answer in a worker process; longer counts 0"
    )
    seed: int | None = Field(default=None, ge=0, lt=2**32, description="order of the training problems; null: the run's seed")

    @property
    def name(self) -> str:
        """What ``build_task`` knows the task by: of a class from elsewhere, ``module:Class``."""
        where = (type(self).__module__, type(self).__qualname__)
        return next((name for name, known in _TASKS.items() if known == where), ":".join(where))

    @field_validator("template")
    @classmethod
    def _template_has_the_question(cls, template: str) -> str:
        if "{question}" not in template:
            raise ValueError("must contain {question}")
        return template

    def model_post_init(self, context: Any) -> None:
        """Import the user's reward, so that a mistake shows before a run starts."""
        if self.reward is not None:
            import_reward(self.reward)

    @cached_property
    def _own_reward(self) -> Grader | None:
        return None if self.reward is None else reward_worker(self.reward, self.timeout)

    @abstractmethod
    def train_problems(self, start: int, count: int) -> list[Problem]:
        """Training problems ``start`` to ``start + count``; they never end and depend on (seed, index) only."""

    @abstractmethod
    def held_out_problems(self, count: int) -> list[Problem]:
        """Distinct problems never trained on, the same for every seed; fewer than ``count`` when there are no more."""

    @abstractmethod
    def _grade(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[float]:
        """The task's own rewards."""

    def prompt(self, problem: Problem) -> str:
        """The template with the problem's question in it."""
        return self.template.replace("{question}", problem.question)

    def prompts(self, problems: Sequence[Problem]) -> list[str]:
        """What the model is asked first, for as many of the problems as can be known before a run starts."""
        return [self.prompt(problem) for problem in problems]

    def grade(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[float]:
        """One reward per response: the user's own function if one is set, else the task's; 0 where grading failed.

        Args:
            problems: the problem of each response.
            responses: response texts, as long as ``problems``.
        """
        assert len(problems) == len(responses), "one problem per response"
        if self._own_reward is None:
            return self._grade(problems, responses)
        return self._own_reward.grade(list(zip(problems, responses, strict=True)))

    @cached_property
    def _grader(self) -> Grader | None:
        """The worker process of a task whose answers may hang or crash what grades them."""
        return None

    @property
    def graders(self) -> list[Grader]:
        """The worker processes it grades with, which count what failed."""
        return [grader for grader in (self._own_reward, self._grader) if grader is not None]

    @property
    def host(self) -> Host | None:
        """What runs the environments of a task that is played in several turns; None: a response is one turn."""
        return None

    def episode_seed(self, problem: Problem) -> int:
        """The seed of an episode, the same for all responses to its problem."""
        return zlib.crc32(problem.question.encode())

    def origin(self, *, held_out: bool) -> Origin:
        """Where the problems to train on, or those to evaluate on, come from."""
        return Origin()

    def fingerprint(self) -> str:
        """Identify the training problems, so that a run is resumed with the same ones."""
        return fingerprint(self.train_problems(0, _FINGERPRINTED))

    def close(self) -> None:
        """End the worker processes; the task may be used again afterwards."""
        for grader in self.graders:
            grader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def build_task(settings: Mapping[str, Any]) -> Task:
    """The task that ``settings["name"]`` asks for, with the other settings as its fields.

    Raises:
        UserError: unknown name, unknown or wrong setting, unreadable data, or a missing extra; in one line.
    """
    if odd := next((key for key in settings if not isinstance(key, str)), None):
        raise UserError(f"task: {shown(odd)} is no name of a setting")
    fields = dict(settings)
    name = fields.pop("name", None)
    if name is None:
        raise UserError(f"task.name is missing (allowed: {', '.join(task_names())})")
    cls = _task_class(name, fields)
    try:
        return cls(**fields)
    except ValidationError as error:
        raise UserError(explain(error, cls, "task.")) from error


def _task_class(name: object, fields: dict[str, Any]) -> type[Task]:
    """The class; a data set that is part of the name becomes a field."""
    kind, colon, rest = str(name).partition(":")
    if colon and kind not in _TASKS and all(part.isidentifier() for part in [*kind.split("."), rest]):
        return _own_class(str(name))
    if kind not in _TASKS or bool(colon) != (kind == "reasoning_gym") or (colon and not rest):
        raise UserError(f"unknown task {shown(name)} (allowed: {', '.join(task_names())}){did_you_mean(kind, _TASKS)}")
    if colon and fields.setdefault("dataset", rest) != rest:
        raise UserError(f"task.dataset={shown(fields['dataset'])} contradicts task.name={name!r}: leave task.dataset out")
    module, class_name = _TASKS[kind]
    cls: type[Task] = getattr(importlib.import_module(module), class_name)
    return cls


def _own_class(reference: str) -> type[Task]:
    """A task class of the user's own."""
    key = f"task.name={reference!r}"
    cls = import_named("task.name", reference, "module:Class, for example my_task:Reversal")
    if not (isinstance(cls, type) and issubclass(cls, Task)):
        raise UserError(f"{key}: is no class that derives from rlzoo.tasks.Task")
    if missing := sorted(cls.__abstractmethods__):
        raise UserError(f"{key}: lacks {', '.join(missing)}")
    if getattr(cls, "name", None) is not Task.name:  # config.yaml must lead back to the class
        raise UserError(f"{key}: has a name of its own: a task from elsewhere is known by its module and class")
    return cls


def task_names() -> list[str]:
    """The names ``build_task`` takes."""
    return [*(f"{name}:<dataset>" if name == "reasoning_gym" else name for name in sorted(_TASKS)), _OWN]


def is_held_out(question: str) -> bool:
    """Whether a question is kept for evaluation: decided by its text, so training can never meet it.

    Example:
        >>> is_held_out("1+1"), is_held_out("2+4")
        (False, True)
    """
    return zlib.crc32(question.encode()) % _HELD_OUT_SHARE == 0


def fingerprint(problems: Sequence[Problem]) -> str:
    """Tells problems that are not the same ones, in the same order, apart."""
    return hashlib.sha256(repr([(problem.question, problem.answer) for problem in problems]).encode()).hexdigest()
