"""Questions and answers read from JSON-lines files and hub data sets in the layouts of GSM8K, MATH, AMC, AIME and DAPO."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlzoo.errors import UserError, shown
from rlzoo.parsing import UnreadableError, parse_json
from rlzoo.tasks.extraction import after_hashes, last_boxed
from rlzoo.tasks.task import require_extra
from rlzoo.types import Problem

_QUESTION_COLUMNS = ("question", "problem")
_USED_COLUMNS = (*_QUESTION_COLUMNS, "prompt", "answer", "reward_model", "solution")
# what BytedTsinghua-SIA/DAPO-Math-17k puts around each of its questions; the task has a template of its own
_DAPO_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer "
    "(without quotes) where $Answer is the answer to the problem.\n\n"
)
_DAPO_AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'
_FILE_ENDINGS = (".json", ".jsonl")
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")  # name or owner/name


def is_file_name(path: str) -> bool:
    """Whether a path means a local file rather than a data set: it is one, or is named like one and not like a data set."""
    try:
        if Path(path).is_dir():
            return False  # datasets reads a folder as a data set
        is_file = Path(path).is_file()
    except OSError:  # longer than any name
        is_file = True  # reading it says what is wrong
    return is_file or path.endswith(_FILE_ENDINGS) or not _HUB_NAME.fullmatch(path)


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
    except (OSError, ValueError) as error:  # no text, or a name that no file can have
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: JSON strings may hold U+2028
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except UnreadableError as error:
            raise UserError(f"{path} line {number}: not JSON: {error}") from error
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
    return ((f"{name} {split} row {index}", row) for index, row in enumerate(_one_by_one(rows)))


def _one_by_one(rows: Any) -> Iterator[dict[str, Any]]:
    """The rows of a data set, a thousand read at once: DAPO's has 1.8 million, each question a hundred times."""
    used = [column for column in rows.column_names if column in _USED_COLUMNS]
    for batch in rows.select_columns(used or rows.column_names).iter(batch_size=1000):
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(batch, values, strict=True))


def _problem(place: str, row: Any) -> Problem:
    if not isinstance(row, Mapping):
        raise UserError(f"{place}: a {type(row).__name__}, not an object with columns")
    question = next((row[column] for column in _QUESTION_COLUMNS if row.get(column) is not None), None)
    if question is None:
        question = _asked(row.get("prompt"))
    if question is None:
        raise _missing(place, row, "question or problem, nor prompt with messages")
    if not isinstance(question, str) or not question.strip():
        raise UserError(f"{place}: the question is {shown(question)}, not a text")
    return Problem(question=question, answer=_answer(place, row))


def _asked(prompt: object) -> object:
    """The question in a list of messages, without what DAPO's data set puts around it."""
    messages = prompt if isinstance(prompt, list) else []
    asked = [message.get("content") for message in messages if isinstance(message, Mapping) and message.get("role") == "user"]
    if not asked or not isinstance(asked[-1], str):
        return None
    return asked[-1].removeprefix(_DAPO_BEFORE).removesuffix(_DAPO_AFTER)


def _answer(place: str, row: Mapping[str, Any]) -> str:
    given = row.get("answer")
    if given is None and isinstance(row.get("reward_model"), Mapping):
        given = row["reward_model"].get("ground_truth")
    if given is None and isinstance(row.get("solution"), str):
        boxed = last_boxed(row["solution"])
        if boxed is None:
            raise UserError(f"{place}: no column 'answer', and no \\boxed{{}} in 'solution' to take it from")
        given = boxed
    if given is None:
        raise _missing(place, row, "answer, reward_model with ground_truth, or solution with \\boxed{}")
    if isinstance(given, float) and given.is_integer():
        given = int(given)  # AMC's files write 27 as 27.0
    if isinstance(given, bool) or not isinstance(given, int | float | str) or not _is_finite(given):
        raise UserError(f"{place}: the answer is {shown(given)}, not a text or a number")
    answer = clean_answer(str(given))
    if not answer:
        raise UserError(f"{place}: the answer is empty")
    return answer


def _is_finite(given: float | str) -> bool:
    return not isinstance(given, float) or math.isfinite(given)


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
