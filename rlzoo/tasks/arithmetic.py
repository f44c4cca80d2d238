"""Sums of small numbers, a task that a tiny model learns in minutes and whose answers are easy to check."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from rlzoo.core.errors import UserError
from rlzoo.tasks.problem import Problem
from rlzoo.tasks.task import MAX_TRIES, Drawn, Task, is_held_out

_INTEGER = re.compile(r"[+-]?[0-9]+")  # not \d, which also matches digits in other scripts
_NUMBER = re.compile(r"(?:(?<![0-9])[+-])?[0-9]+(?:\.[0-9]+)?")  # the minus in 5-23 is no sign, and 7.23 is one number


class ArithmeticTask(Drawn, Task):
    """Sums such as ``3+5+9+6``. The answer is the number after the last marker in the response, such as 23 in ``8,17#23``."""

    template: str = Field(default="{question}=", description="prompt template; {question} is replaced by the sum")
    operand_max: int = Field(default=9, ge=1, le=10**6, description="largest number in a sum; the smallest is 1")
    num_operands_min: int = Field(default=2, ge=2, le=1000, description="minimum number of operands in a sum")
    num_operands_max: int = Field(default=20, ge=2, le=1000, description="maximum number of operands in a sum")
    answer_marker: str = Field(
        default="#",
        description="text before the answer, which is an integer; if empty, the last integer in the response is the answer",
    )

    def model_post_init(self, context: Any) -> None:
        """Reject settings that leave no questions for training or for evaluation."""
        super().model_post_init(context)
        if self.num_operands_max < self.num_operands_min:
            raise UserError(
                f"task.num_operands_max={self.num_operands_max} is below task.num_operands_min={self.num_operands_min}"
            )
        tries = min(MAX_TRIES, 20 * MAX_TRIES // self.num_operands_max)  # long sums are slow to draw and are rarely repeated
        sides = (is_held_out(self._draw(f"check:{index}")) for index in range(tries))
        first = next(sides)
        if not any(side != first for side in sides):
            raise UserError(
                f"task.operand_max={self.operand_max} and task.num_operands_max={self.num_operands_max} allow "
                "too few questions for a training and an evaluation split; increase one of these settings"
            )

    def _draw(self, key: str) -> str:
        generator = random.Random(key)
        length = generator.randint(self.num_operands_min, self.num_operands_max)
        return "+".join(str(generator.randint(1, self.operand_max)) for _ in range(length))

    def _problem(self, question: str) -> Problem:
        return Problem(question=question, answer=str(sum(map(int, question.split("+")))))

    def _grade(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[float]:
        answers = (self.answer(response) for response in responses)
        return [float(answer == int(problem.answer)) for problem, answer in zip(problems, answers, strict=True)]

    def answer(self, response: str) -> int | None:
        """Return the integer given as the answer in a response, or None if there is none."""
        if not self.answer_marker:
            numbers = _NUMBER.findall(response)
            text = numbers[-1] if numbers else ""
        else:
            _, marker, after = response.rpartition(self.answer_marker)
            text = after.strip() if marker else ""
        if not _INTEGER.fullmatch(text) or len(text) > 100:  # int() rejects more than 4300 digits
            return None
        return int(text)

    def answer_groups(self, responses: Sequence[str], rewards: Sequence[float]) -> list[int | None]:
        """Return, for each response, the index of the first response with the same answer, or None if it has no answer."""
        answers = [self.answer(response) for response in responses]
        return [None if answer is None else answers.index(answer) for answer in answers]
