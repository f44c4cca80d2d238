"""Linear recurrences that are computed term by term. The questions are short, and solutions have 7 to 2,000 tokens."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Sequence
from string import ascii_lowercase
from typing import Any

from pydantic import Field

from rlzoo.core.errors import UserError
from rlzoo.tasks.problem import Problem
from rlzoo.tasks.task import Drawn, Task

ANSWER_MARKER = "#"
_QUESTION = re.compile(r"(?P<counter>[0-9]+)(?P<letter>[a-i])(?P<before>[0-9]+),[0-9]+[a-i](?P<last>[0-9]+),")


class RecurrenceTask(Drawn, Task):
    """Terms of ``x[n+1] = k x[n] + x[n-1]``, each reduced to its last ``digits`` digits.

    The question gives two terms, as in ``004c17,003c42,``. Each term is preceded by the number of remaining steps and a
    letter for the multiplier (``a`` is 1, ``c`` is 3). The solution continues in the same form and gives the answer after a
    marker, as in ``002c43,001c71,000#56``. The number of steps is drawn log-uniformly, so that all octaves are equally likely.
    """

    digits: int = Field(default=2, ge=1, le=6, description="number of digits in a term")
    multiplier_max: int = Field(default=9, ge=1, le=9, description="largest multiplier; the smallest is 1")
    steps_min: int = Field(default=1, ge=1, le=100_000, description="minimum number of terms to compute")
    steps_max: int = Field(default=250, ge=1, le=100_000, description="maximum number of terms to compute")

    def model_post_init(self, context: Any) -> None:
        """Reject an empty range of steps."""
        super().model_post_init(context)
        if self.steps_max < self.steps_min:
            raise UserError(f"task.steps_max={self.steps_max} is below task.steps_min={self.steps_min}")

    def _draw(self, key: str) -> str:
        generator = random.Random(key)
        steps = int(math.exp(generator.uniform(math.log(self.steps_min), math.log(self.steps_max + 1))))
        steps = min(max(steps, self.steps_min), self.steps_max)  # rounding may move the number outside its range
        letter = ascii_lowercase[generator.randint(1, self.multiplier_max) - 1]
        width = len(str(self.steps_max + 1))
        terms = [generator.randrange(10**self.digits) for _ in range(2)]
        left = (steps + 1, steps)
        return "".join(f"{number:0{width}}{letter}{term:0{self.digits}}," for number, term in zip(left, terms, strict=True))

    def _problem(self, question: str) -> Problem:
        *_, last = worked_terms(question)
        return Problem(question=question, answer=last.rpartition(ANSWER_MARKER)[2])

    def _grade(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[float]:
        answers = (response.rpartition(ANSWER_MARKER)[1:] for response in responses)
        return [
            float(marker != "" and answer == problem.answer)
            for problem, (marker, answer) in zip(problems, answers, strict=True)
        ]


def worked_terms(question: str) -> Iterator[str]:
    """Yield each term of the solution as text, with its counter and separator.

    Example:
        >>> list(worked_terms("004c17,003c42,"))
        ['002c43,', '001c71,', '000#56']
    """
    match = _QUESTION.fullmatch(question)
    assert match is not None, "a question of this task"
    letter, before, last = match["letter"], int(match["before"]), int(match["last"])
    width, digits = len(match["counter"]), len(match["last"])
    multiplier = ascii_lowercase.index(letter) + 1
    for left in reversed(range(int(match["counter"]) - 1)):
        before, last = last, (multiplier * last + before) % 10**digits
        yield f"{left:0{width}}{letter}{last:0{digits}}," if left else f"{left:0{width}}{ANSWER_MARKER}{last:0{digits}}"
