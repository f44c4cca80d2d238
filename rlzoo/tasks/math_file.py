"""Mathematics questions from a local file or a hub dataset, graded by math-verify."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cached_property, lru_cache, partial
from typing import Any, Literal

from pydantic import Field

from rlzoo.core.errors import UserError
from rlzoo.core.settings import NameOrPath
from rlzoo.tasks.grading import Grader
from rlzoo.tasks.math_grading import ASK_FOR_A_BOX, MathGrader
from rlzoo.tasks.math_rows import is_file_name, read_problems
from rlzoo.tasks.problem import Problem
from rlzoo.tasks.task import Task, is_held_out, question_key


class MathFileTask(Task):
    """Questions with a reference answer. The reward is 1 if the answer is mathematically equal to the reference, else 0."""

    path: NameOrPath = Field(default="openai/gsm8k", min_length=1, description="a local .jsonl file, or a dataset on the hub")
    eval_path: NameOrPath | None = Field(
        default=None,
        min_length=1,
        description="questions to evaluate on; null: one eighth of a local file, or the 'test' split of a hub dataset",
    )
    subset: str | None = Field(
        default=None, min_length=1, description="subset of the hub dataset; null: 'main' if it exists, else the default subset"
    )
    order: Literal["shuffled", "file"] = Field(
        default="shuffled", description="order of the training questions: shuffled in each epoch, or as in the file"
    )
    template: str = Field(default=ASK_FOR_A_BOX, description="prompt template; {question} is replaced by the question")

    def model_post_init(self, context: Any) -> None:
        """Read the data so that an error in the data is reported before a run starts."""
        super().model_post_init(context)
        if self.reward is None:
            _ = self._mathematics
        _ = self._problems

    @cached_property
    def _problems(self) -> tuple[list[Problem], list[Problem]]:
        """The training problems and the held-out problems. No question is in both lists."""
        read = partial(read_problems, subset=self.subset, own_reward=self.reward is not None)
        rows = read(self.path, "train")
        if self.eval_path is not None:
            held_out = read(self.eval_path, "test")
        elif is_file_name(self.path):
            held_out = [problem for problem in rows if is_held_out(problem.question)]
        else:
            held_out = read(self.path, "test")
        questions = {question_key(problem.question) for problem in held_out}
        train = [problem for problem in rows if question_key(problem.question) not in questions]
        if not train:
            where = f"also in task.eval_path={self.eval_path!r}" if self.eval_path else "held out; add more rows"
            raise UserError(f"no questions are left to train on: every question in task.path={self.path!r} is {where}")
        # shuffle, because files are often sorted by difficulty and an evaluation may use only the first few problems
        order = _shuffled(len(held_out), "held-out")
        return train, [held_out[index] for index in order]

    def train_problems(self, start: int, count: int) -> list[Problem]:
        """Return ``count`` training problems, starting at index ``start``; see ``task.order``."""
        rows = self._problems[0]
        if self.order == "file":
            return [rows[index % len(rows)] for index in range(start, start + count)]
        places = (divmod(index, len(rows)) for index in range(start, start + count))
        return [rows[_shuffled(len(rows), f"{self.seed}:{epoch}")[place]] for epoch, place in places]

    def held_out_problems(self, count: int) -> list[Problem]:
        """Return the first ``count`` held-out problems in a fixed shuffled order, or all of them if there are fewer."""
        return self._problems[1][:count]

    def num_problems(self, *, held_out: bool) -> int:
        """See `Task.num_problems`."""
        return len(self._problems[held_out])

    @cached_property
    def _mathematics(self) -> MathGrader:
        return MathGrader(self.timeout)

    @property
    def _grader(self) -> Grader | None:
        return None if self.reward else self._mathematics.worker

    def _grade(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[float]:
        return self._mathematics.grade(problems, responses)

    def answer_groups(self, responses: Sequence[str], rewards: Sequence[float]) -> list[int | None]:
        """See `MathGrader.answer_groups`."""
        return self._mathematics.answer_groups(responses, rewards)


@lru_cache(maxsize=8)
def _shuffled(size: int, key: str) -> tuple[int, ...]:
    order = list(range(size))
    random.Random(key).shuffle(order)
    return tuple(order)
