"""Grades the reference solutions and answers of the mathematics suites, as well as deliberately wrong answers.

RLZOO_DATA=FOLDER python examples/lab/grade_references.py

FOLDER contains the files that `rlzoo eval --data FOLDER` reads. Suites without a file are skipped.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from rlzoo.tasks.math_grading import MathGrader
from rlzoo.tasks.problem import Problem
from rlzoo.tasks.suites import SUITES

NUMBER = re.compile(r"[0-9]+")
LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z]|(?<=\{)[A-Za-z]")
SUITE_NAMES = ("gsm8k", "math500", "amc23", "aime24", "aime25")


def raised(answer: str, which: int) -> str | None:
    """Return the answer with one of its numbers increased by 1, or None if it has no number."""
    numbers = list(NUMBER.finditer(answer))
    if not numbers:
        return None
    number = numbers[which]
    return f"{answer[: number.start()]}{int(number.group()) + 1}{answer[number.end() :]}"


def other_letter(answer: str) -> str | None:
    """Return the answer with one letter changed, or None if it contains a number or has no letter."""
    letter = LETTER.search(answer)
    if NUMBER.search(answer) or letter is None:
        return None
    return f"{answer[: letter.start()]}{'w' if letter.group() == 'q' else 'q'}{answer[letter.end() :]}"


CHANGES: dict[str, Callable[[str], str | None]] = {
    "plus 1": lambda answer: f"{answer}+1",
    "first number + 1": lambda answer: raised(answer, 0),
    "last number + 1": lambda answer: raised(answer, -1),
    "other letter": other_letter,
}


def graded(grader: MathGrader, pairs: list[tuple[Problem, str]], should_be: float) -> tuple[str, list[str]]:
    """Return the number of correct judgements, the total, and the wrong judgements."""
    rewards = grader.grade([problem for problem, _ in pairs], [response for _, response in pairs])
    others = [
        f"{problem.answer} | {response[-60:]}"
        for (problem, response), reward in zip(pairs, rewards, strict=True)
        if reward != should_be
    ]
    return f"{len(pairs) - len(others)} of {len(pairs)}", others


def rows_of(grader: MathGrader, name: str, folder: Path) -> dict[str, tuple[str, list[str]]]:
    """Return the counts for one suite."""
    problems = SUITES[name].problems(folder, None)
    files = (f"{name}.jsonl", *SUITES[name].files)
    file = next(folder / file for file in files if (folder / file).is_file())
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
    answers = [(problem, f"So it is $\\boxed{{{problem.answer}}}$.") for problem in problems]
    found = {"answers, judged right": graded(grader, answers, 1.0)}
    found["the same by math-verify alone"] = by_library(grader, problems)
    texts = [row.get("solution") or row["answer"] for row in rows]
    if all(isinstance(text, str) for text in texts):
        found["solutions, judged right"] = graded(grader, list(zip(problems, texts, strict=True)), 1.0)
    for label, change in CHANGES.items():
        changed = [(problem, change(problem.answer)) for problem in problems]
        pairs = [(problem, f"\\boxed{{{answer}}}") for problem, answer in changed if answer is not None]
        if pairs:
            found[f"{label}, judged wrong"] = graded(grader, pairs, 0.0)
    return found


def by_library(grader: MathGrader, problems: list[Problem]) -> tuple[str, list[str]]:
    """Compare each answer with itself, skipping the text comparison that grading usually does first."""
    rewards = grader.worker.grade([(problem.answer, problem.answer, True) for problem in problems])
    others = [problem.answer for problem, reward in zip(problems, rewards, strict=True) if not reward]
    return f"{len(problems) - len(others)} of {len(problems)}", others


def main() -> None:
    """Print the counts, and print every wrong judgement to stderr."""
    folder = Path(os.environ.get("RLZOO_DATA", ""))
    if "RLZOO_DATA" not in os.environ or not folder.is_dir():
        sys.exit("set RLZOO_DATA to the folder that contains the files of the suites")
    grader = MathGrader(timeout=5)
    print("| suite | what | count |")
    print("|---|---|---|")
    for name in SUITE_NAMES:
        if any((folder / file).is_file() for file in (f"{name}.jsonl", *SUITES[name].files)):
            for what, (count, others) in rows_of(grader, name, folder).items():
                print(f"| {name} | {what} | {count} |")
                for other in others:
                    print(f"{name}, {what}: not {other}", file=sys.stderr)
    grader.close()


if __name__ == "__main__":
    main()
