"""Questions and answers read from JSON-lines files and hub data sets in the layouts of GSM8K, MATH, AMC and AIME."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlzoo.errors import UserError
from rlzoo.tasks.extraction import after_hashes, last_boxed
from rlzoo.tasks.task import require_extra
from rlzoo.types import Problem

_QUESTION_COLUMNS = ("question", "problem")
_FILE_ENDINGS = (".json", ".jsonl")
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")  # name or owner/name


def is_file_name(path: str) -> bool:
    """Whether a path means a local file rather than a data set: it is one, or is named like one and not like a data set."""
    if Path(path).is_dir():
        return False  # datasets reads a folder as a data set
    return Path(path).is_file() or path.endswith(_FILE_ENDINGS) or not _HUB_NAME.fullmatch(path)


def read_problems(path: str, split: str, subset: str | None) -> list[Problem]:
    """The problems of a local file, or of one split of a hub data set, each question once.

    Raises:
        UserError: not found, empty, or a row is not usable; in one line, with the row's place.
    """
    rows = _file_rows(path) if is_file_name(path) else _hub_rows(path, split, subset)
    problems: dict[str, Problem] = {}
    for place, row in rows:
        problem = _problem(place, row)
        problems.setdefault(problem.question, problem)
    if not problems:
        raise UserError(f"{path}: no rows")
    return list(problems.values())


def _file_rows(path: str) -> Iterator[tuple[str, Any]]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: file not found (from {Path.cwd()})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: JSON strings may hold U+2028
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path} line {number}: not JSON: {error.msg} at column {error.colno}") from error
        yield f"{path} line {number}", row


def _hub_rows(name: str, split: str, subset: str | None) -> Iterable[tuple[str, Any]]:
    require_extra("datasets", "datasets")
    import datasets

    try:
        subsets = datasets.get_dataset_config_names(name)
        chosen = subset or ("main" if "main" in subsets else None)  # GSM8K calls its ordinary subset main
        splits = datasets.get_dataset_split_names(name, chosen)
        rows = datasets.load_dataset(name, chosen, split=split) if split in splits else None
    except Exception as error:  # network, name, subset: its own classes differ from version to version
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{name!r} is not a file, and loading it as a hub data set failed: {reason}") from error
    if rows is None:
        raise UserError(f"data set {name!r} has no split {split!r} (it has: {', '.join(splits)}): set task.eval_path")
    return ((f"{name} {split} row {index}", row) for index, row in enumerate(rows))


def _problem(place: str, row: Any) -> Problem:
    if not isinstance(row, Mapping):
        raise UserError(f"{place}: a {type(row).__name__}, not an object with columns")
    question = next((row[column] for column in _QUESTION_COLUMNS if row.get(column) is not None), None)
    if question is None:
        raise _missing(place, row, "question or problem")
    if not isinstance(question, str) or not question.strip():
        raise UserError(f"{place}: the question is {question!r}, not a text")
    return Problem(question=question, answer=_answer(place, row))


def _answer(place: str, row: Mapping[str, Any]) -> str:
    given = row.get("answer")
    if given is None and isinstance(row.get("solution"), str):
        boxed = last_boxed(row["solution"])
        if boxed is None:
            raise UserError(f"{place}: no column 'answer', and no \\boxed{{}} in 'solution' to take it from")
        given = boxed
    if given is None:
        raise _missing(place, row, "answer, or solution with \\boxed{}")
    if isinstance(given, float) and given.is_integer():
        given = int(given)  # AMC's files write 27 as 27.0
    if isinstance(given, bool) or not isinstance(given, int | float | str):
        raise UserError(f"{place}: the answer is {given!r}, not a text or a number")
    answer = clean_answer(str(given))
    if not answer:
        raise UserError(f"{place}: the answer is empty")
    return answer


def clean_answer(answer: str) -> str:
    r"""The answer alone: after GSM8K's ``####`` without commas, or inside the last ``\boxed{}``, or as it is.

    Example:
        >>> clean_answer("He pays 2 * 600 = 1,200.\n#### 1,200")
        '1200'
    """
    hashes = after_hashes(answer)
    if hashes is not None:
        return hashes.replace(",", "")
    boxed = last_boxed(answer)
    return answer.strip() if boxed is None else boxed


def _missing(place: str, row: Mapping[str, Any], wanted: str) -> UserError:
    return UserError(f"{place}: no column {wanted} (columns present: {', '.join(map(str, row)) or 'none'})")
