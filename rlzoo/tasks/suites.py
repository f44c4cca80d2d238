"""Evaluation suites: which questions, how they are asked, and how answers are judged."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlzoo.errors import UserError, did_you_mean, shown
from rlzoo.support.extras import require_extra
from rlzoo.tasks.arithmetic import ArithmeticTask
from rlzoo.tasks.math_grading import ASK_FOR_A_BOX, MathGrader, math_worker_process
from rlzoo.tasks.math_rows import read_problems
from rlzoo.types import Problem

TIMEOUT = 5.0  # seconds for one comparison, as in training
NUM_SUMS = 200
_NAME = re.compile(r"\w[\w.-]{0,99}", re.ASCII)  # it becomes the name of a file


SuiteGrader = MathGrader | ArithmeticTask
"""Judges responses to a suite's problems, and says which of them give the same answer."""


def math_grader() -> SuiteGrader:
    """Judges answers as mathematics, by math-verify in a worker process.

    Raises:
        UserError: math-verify is not installed.
    """
    require_extra("math-verify", "math_verify")
    return MathGrader(math_worker_process(TIMEOUT))


@dataclass(frozen=True, slots=True)
class Suite:
    """A set of questions with reference answers.

    The question is read from a column ``question`` or ``problem``, the reference from ``answer``, else from ``solution``.
    """

    name: str
    source: str | None = None  # data set on the hub; None: the arithmetic task's own held-out sums
    subset: str | None = None
    split: str = "test"
    files: tuple[str, ...] = ()  # names of a local copy beside <name>.jsonl
    template: str = ASK_FOR_A_BOX
    make_grader: Callable[[], SuiteGrader] = math_grader

    def problems(self, folder: Path | None, limit: int | None) -> list[Problem]:
        """The first ``limit`` problems, in the order they are stored in, each question once.

        Args:
            folder: holds local copies; None: the hub.
            limit: how many at most; None for all.

        Raises:
            UserError: they are not there, or cannot be read.
        """
        if folder is None and self.source is None:
            return ArithmeticTask().held_out_problems(NUM_SUMS)[:limit]
        where = str(self.source) if folder is None else str(self._file(folder))
        try:
            return read_problems(where, self.split, self.subset)[:limit]
        except UserError as error:
            hint = "; local copies are read with --data FOLDER" if folder is None else ""
            raise UserError(f"suite {self.name!r}: {error}{hint}") from error

    def prompt(self, problem: Problem) -> str:
        """The template with the problem's question in it."""
        return self.template.replace("{question}", problem.question)

    def _file(self, folder: Path) -> Path:
        names = (f"{self.name}.jsonl", *self.files)
        found = next((folder / name for name in names if (folder / name).is_file()), None)
        if found is None:
            raise UserError(f"suite {self.name!r}: no {' or '.join(names)} in --data {str(folder)!r}")
        return found


SUITES = {
    suite.name: suite
    for suite in (
        Suite("gsm8k", "openai/gsm8k", subset="main", files=("gsm8k_test.jsonl",)),
        Suite("math500", "HuggingFaceH4/MATH-500"),
        Suite("amc23", "math-ai/amc23"),
        Suite("aime24", "HuggingFaceH4/aime_2024", split="train"),
        Suite("aime25", "math-ai/aime25"),
        Suite("arithmetic", template="{question}=", make_grader=ArithmeticTask),
    )
}


def find_suite(name: str, folder: Path | None) -> Suite:
    """A suite of the table, or one of the user's own: mathematics questions in ``<name>.jsonl`` of the folder.

    Raises:
        UserError: there is neither.
    """
    if name in SUITES:
        return SUITES[name]
    if folder is not None and _NAME.fullmatch(name) and (folder / f"{name}.jsonl").is_file():
        return Suite(name)
    own = f", or NAME.jsonl in --data {str(folder)!r}" if folder else ""
    raise UserError(f"unknown suite {shown(name)} (allowed: {', '.join(SUITES)}{own}){did_you_mean(name, SUITES)}")
