"""Evaluation suites, with their questions, prompts and graders."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlzoo.core.errors import UserError, did_you_mean, shown
from rlzoo.tasks.arithmetic import ArithmeticTask
from rlzoo.tasks.math_grading import ASK_FOR_A_BOX, MathGrader
from rlzoo.tasks.math_rows import read_problems
from rlzoo.tasks.problem import Problem

NUM_SUMS = 200
_NAME = re.compile(r"\w[\w.-]{0,99}", re.ASCII)  # becomes a file name


SuiteGrader = MathGrader | ArithmeticTask
"""Grades responses to a suite's problems and groups equal answers."""


@dataclass(frozen=True, slots=True)
class Suite:
    """A set of questions with reference answers.

    `rlzoo.tasks.math_rows` lists the columns from which questions and references are read.
    """

    name: str
    source: str | None = None  # dataset on the hub; None for the held-out sums of the arithmetic task
    subset: str | None = None
    split: str = "test"
    files: tuple[str, ...] = ()  # file names of a local copy, in addition to <name>.jsonl
    template: str = ASK_FOR_A_BOX
    make_grader: Callable[[], SuiteGrader] = MathGrader

    def problems(self, folder: Path | None, limit: int | None) -> list[Problem]:
        """Return the first ``limit`` problems in stored order, without duplicate questions.

        Args:
            folder: folder with local copies; None to read from the hub.
            limit: maximum number of problems; None for all.

        Raises:
            UserError: the data is missing or cannot be read.
        """
        if folder is None and self.source is None:
            return ArithmeticTask().held_out_problems(NUM_SUMS)[:limit]
        where = str(self.source) if folder is None else str(self._file(folder))
        try:
            return read_problems(where, self.split, self.subset)[:limit]
        except UserError as error:
            hint = "; use --data FOLDER to read local copies" if folder is None else ""
            raise UserError(f"suite {self.name!r}: {error}{hint}") from error

    def prompt(self, problem: Problem) -> str:
        """Return the template with the problem's question filled in."""
        return self.template.replace("{question}", problem.question)

    def _file(self, folder: Path) -> Path:
        names = (f"{self.name}.jsonl", *self.files)
        file = next((folder / name for name in names if (folder / name).is_file()), None)
        if file is None:
            raise UserError(f"suite {self.name!r}: no {' or '.join(names)} in --data {str(folder)!r}")
        return file


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
    """Return a built-in suite, or a user's suite of mathematics questions from ``<name>.jsonl`` in the folder.

    Raises:
        UserError: there is no such suite.
    """
    if name in SUITES:
        return SUITES[name]
    if folder is not None and _NAME.fullmatch(name) and (folder / f"{name}.jsonl").is_file():
        return Suite(name)
    local = f", or NAME.jsonl in --data {str(folder)!r}" if folder else ""
    raise UserError(f"unknown suite {shown(name)} (allowed: {', '.join(SUITES)}{local}){did_you_mean(name, SUITES)}")
