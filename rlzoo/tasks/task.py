"""Tasks, each with endless training prompts, separate evaluation prompts, and a grade for every response."""

from __future__ import annotations

import hashlib
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import Field, ValidationError, field_validator

from rlzoo.core.errors import UserError, did_you_mean, explain, shown
from rlzoo.core.settings import Settings
from rlzoo.support.workers import Worker
from rlzoo.tasks.async_grading import AsyncGrader
from rlzoo.tasks.environments import Host
from rlzoo.tasks.grading import Grade, Grader
from rlzoo.tasks.problem import Problem
from rlzoo.tasks.user_code import import_named, import_reward, reward_worker

_FINGERPRINTED = 2048  # number of problems of an endless task that are hashed
_HELD_OUT_SHARE = 8  # one in eight questions is held out for evaluation
MAX_TRIES = 2000  # the search ends after this many consecutive draws without a new held-out problem


class Task(Settings, ABC):
    """Prompts with verifiable rewards. The fields hold the settings, and the methods define the behaviour.

    ``build_task({"name": task.name, **task.model_dump()})`` returns an equal task.
    """

    right_or_wrong: ClassVar[bool] = True
    """Whether the task's own grades are 1 or 0, so that their mean is an accuracy. Otherwise, the mean is a reward."""

    template: str = Field(default="{question}", description="prompt template; {question} is replaced by the question")
    reward: str | None = Field(
        default=None,
        min_length=1,
        description="custom reward as module:function, def or async def, called with (problem, response); null: the task's own",
    )
    timeout: float = Field(
        default=5.0,
        gt=0,
        le=3600,
        description="time limit in seconds for grading one answer in a worker process; a slower answer is wrong or, "
        "with a custom reward, has no grade",
    )
    reward_concurrency: int = Field(
        default=32, ge=1, le=4096, description="maximum number of concurrent calls to an async def reward, in each process"
    )
    seed: int | None = Field(
        default=None, ge=0, lt=2**32, description="seed for the order of the training problems; null: the run's seed"
    )

    @cached_property
    def name(self) -> str:
        """The name that ``build_task`` accepts for this task, either from an installed plugin or as ``module:Class``."""
        from rlzoo.core.zoo import load_zoo

        reference = f"{type(self).__module__}:{type(self).__qualname__}"
        name = next((name for name, served in load_zoo().tasks.items() if served == reference), reference)
        return re.sub(r"<(\w+)>$", lambda setting: str(getattr(self, setting[1])), name)

    @field_validator("template")
    @classmethod
    def _template_has_the_question(cls, template: str) -> str:
        if "{question}" not in template:
            raise ValueError("must contain {question}")
        return template

    def model_post_init(self, context: Any) -> None:
        """Import the user's reward function so that an import error is reported before a run starts."""
        if self.reward is not None:
            import_reward(self.reward)

    @cached_property
    def _own_reward(self) -> Grader | AsyncGrader | None:
        return None if self.reward is None else reward_worker(self.reward, self.timeout, self.reward_concurrency)

    @abstractmethod
    def train_problems(self, start: int, count: int) -> list[Problem]:
        """Return ``count`` problems from an endless training sequence, starting at index ``start``.

        A problem depends only on the seed and its index.
        """

    @abstractmethod
    def held_out_problems(self, count: int) -> list[Problem]:
        """Return up to ``count`` distinct problems that are never used for training and do not depend on the seed."""

    @abstractmethod
    def _grade(self, problems: Sequence[Problem], responses: Sequence[str]) -> Sequence[Grade | None]:
        """Return one reward per response, as computed by the task itself, or None for a response without a grade."""

    def prompt(self, problem: Problem) -> str:
        """Return the template with the problem's question filled in."""
        return self.template.replace("{question}", problem.question)

    def prompts(self, problems: Sequence[Problem]) -> list[str]:
        """Return the initial prompt of each problem. A multi-turn task may return only the first few."""
        return [self.prompt(problem) for problem in problems]

    def grade(self, problems: Sequence[Problem], responses: Sequence[str]) -> Sequence[Grade | None]:
        """Return one reward per response, from the user's function if there is one, else from the task; None if this fails.

        A reward is a number or a mapping from names to numbers, whose weighted sum is then the reward. A response whose
        grading fails is left out of baselines and has advantage 0. However, an answer that exhausts a built-in grader's time
        or memory counts as wrong.

        Args:
            problems: the problem of each response.
            responses: text of each response, one per problem.
        """
        assert len(problems) == len(responses), "one problem per response"
        if self._own_reward is None:
            return self._grade(problems, responses)
        return self._own_reward.grade(list(zip(problems, responses, strict=True)))

    @cached_property
    def _grader(self) -> Grader | None:
        """The worker process for grading if an answer could make the grader hang or crash, otherwise None."""
        return None

    @property
    def graders(self) -> list[Worker]:
        """The worker processes that grade responses and count failures."""
        return [grader for grader in (self._own_reward, self._grader) if grader is not None]

    @property
    def last_failure(self) -> str:
        """The reason for the most recent grading failure."""
        return next((grader.last_failure for grader in self.graders if grader.last_failure), "the task returned no reward")

    @property
    def host(self) -> Host | None:
        """The host that runs the environments of a multi-turn task, or None for a single-turn task."""
        return None

    def episode_seed(self, problem: Problem) -> int:
        """Return the seed of an episode, which is the same for all responses to its problem."""
        return zlib.crc32(problem.question.encode())

    def num_problems(self, *, held_out: bool) -> int | None:
        """Return the number of training or held-out problems, or None if the task generates them endlessly."""
        return None

    def close(self) -> None:
        """Stop the worker processes. The task can be used again afterwards."""
        for grader in self.graders:
            grader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Drawn(ABC):
    """A mixin for `Task` with endless random problems, of which a hash holds out one in eight for evaluation."""

    if TYPE_CHECKING:
        seed: int | None

    @abstractmethod
    def _draw(self, key: str) -> str:
        """Return a question that depends only on the key."""

    @abstractmethod
    def _problem(self, question: str) -> Problem:
        """Return the problem for a question from `_draw`."""

    def train_problems(self, start: int, count: int) -> list[Problem]:
        """Return ``count`` training problems, starting at index ``start``."""
        return [self._train_problem(index) for index in range(start, start + count)]

    def held_out_problems(self, count: int) -> list[Problem]:
        """Return the first ``count`` distinct held-out problems, or fewer if the settings allow no more."""
        questions: dict[str, None] = {}
        number = last = 0
        while len(questions) < count and number < last + MAX_TRIES:
            question = self._draw(f"held-out:{number}")
            number += 1
            if is_held_out(question) and question not in questions:
                questions[question], last = None, number
        return [self._problem(question) for question in questions]

    def _train_problem(self, index: int) -> Problem:
        attempt = 0
        while is_held_out(question := self._draw(f"train:{self.seed}:{index}:{attempt}")):
            attempt += 1
        return self._problem(question)


def build_task(settings: Mapping[str, Any], tasks: Mapping[str, str] | None = None) -> Task:
    """Return the task named ``settings["name"]`` with the other settings as its fields.

    Args:
        settings: name and settings of the task.
        tasks: ``module:Class`` by name, from the hook ``rlzoo_tasks``; None for the tasks of the installed plugins.

    Raises:
        UserError: the name or a setting is unknown, a value is invalid, data cannot be read, or an extra is missing.
    """
    if tasks is None:
        from rlzoo.core.zoo import load_zoo  # imports torch

        tasks = load_zoo().tasks
    if odd := next((key for key in settings if not isinstance(key, str)), None):
        raise UserError(f"task: {shown(odd)} is not the name of a setting")
    fields = dict(settings)
    cls = _task_class(fields.pop("name", None), tasks, fields)
    try:
        task = cls(**fields)
    except ValidationError as error:
        raise UserError(explain(error, cls, "task.")) from error
    task.__dict__["name"] = str(settings["name"])  # the value of the cached property
    return task


def _task_class(name: object, tasks: Mapping[str, str], fields: dict[str, Any]) -> type[Task]:
    """Return the task's class. A setting in the name, such as the dataset in ``reasoning_gym:gcd``, is added to ``fields``."""
    kind, _, value = str(name).partition(":")
    served = next((known for known in tasks if value and known.startswith(f"{kind}:<")), str(name))
    if served in tasks:
        if served != name:
            setting = served[len(kind) + 2 : -1]
            if setting in fields:
                raise UserError(f"task.{setting}={shown(fields[setting])}: remove this setting; task.name={name!r} sets it too")
            fields[setting] = value
        return _imported(tasks[served])
    kinds = {known.partition(":")[0] for known in tasks}
    if kind not in kinds and value and all(word.isidentifier() for word in [*kind.split("."), value]):
        return _imported(str(name))
    problem = "task.name is missing" if name is None else f"unknown task {shown(name)}"
    allowed = ", ".join([*sorted(tasks), "<module>:<Class>"])
    raise UserError(f"{problem} (allowed: {allowed}){did_you_mean(str(name), tasks)}")


def _imported(reference: str) -> type[Task]:
    """Return the task class that ``module:Class`` names."""
    key = f"task.name={reference!r}"
    cls = import_named("task.name", reference, "module:Class, for example my_task:Reversal")
    if not (isinstance(cls, type) and issubclass(cls, Task)):
        raise UserError(f"{key}: is not a subclass of rlzoo.tasks.Task")
    if missing := sorted(cls.__abstractmethods__):
        raise UserError(f"{key}: does not implement {', '.join(missing)}")
    if getattr(cls, "name", None) is not Task.name:  # the name in config.yaml must identify the class
        raise UserError(f"{key}: defines its own name; a task is identified by its plugin, or by its module and class")
    return cls


def seeded(task: Task, seed: int | None) -> Task:
    """Return the task with ``seed`` as its seed if it has none. The seed determines the order of the questions."""
    return task if task.seed is not None else task.model_copy(update={"seed": seed})


def is_held_out(question: str) -> bool:
    """Return whether a question is held out for evaluation.

    The decision depends only on a hash of the question's `question_key`, so training never uses a held-out question.

    Example:
        >>> is_held_out("1+1"), is_held_out("2+4")
        (False, True)
    """
    return zlib.crc32(question_key(question).encode()) % _HELD_OUT_SHARE == 0


def question_key(question: str) -> str:
    """Return the question with every run of white space replaced by one space. Questions with equal keys count as one."""
    return " ".join(question.split())


def fingerprint(problems: Sequence[Problem]) -> str:
    """Return a hash that identifies these problems in this order."""
    return hashlib.sha256(repr([(problem.question, problem.answer) for problem in problems]).encode()).hexdigest()


def train_fingerprint(task: Task) -> str:
    """Return a hash that identifies a task's training problems in any order or, for an endless task, its first problems."""
    problems = task.train_problems(0, task.num_problems(held_out=False) or _FINGERPRINTED)
    return fingerprint(sorted(problems, key=lambda problem: (problem.question, problem.answer)))
