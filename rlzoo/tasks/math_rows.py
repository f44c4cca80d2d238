"""Reads questions and answers in common layouts from JSON files, Parquet files and hub datasets."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from decimal import Context, Decimal
from functools import partial
from pathlib import Path
from typing import Any

from rlzoo.core.errors import UserError, shown
from rlzoo.support.extras import require_extra
from rlzoo.support.parsing import UnreadableError, parse_json
from rlzoo.support.reading import read_text
from rlzoo.tasks.extraction import after_hashes, last_boxed
from rlzoo.tasks.math_grading import LONGEST_ANSWER, plain_answer, without_thousands_separators
from rlzoo.tasks.problem import Problem
from rlzoo.tasks.task import question_key

_ANSWERS = ("answer", "ground_truth", "final_answer", "expected_answer")
_ASKING = ("question", "problem", "prompt", "messages")
_ANSWERING = (*_ANSWERS, "reward_model", "solution", "messages")
_ALLOWED = (
    "a question in question, problem, prompt or messages, and its answer in "
    + ", ".join(_ANSWERS)
    + ", reward_model.ground_truth, solution or the assistant's message"
)
# the template in the questions of verl's dataset (docs/reference/tasks.md), which is removed because the task has its own
_TEMPLATE_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer "
    "(without quotes) where $Answer is the answer to the problem.\n\n"
)
_TEMPLATE_AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'
_FILE_ENDINGS = (".json", ".jsonl", ".parquet")
_IN_DOLLARS = re.compile(r"\$([^$]+)\$")
_decimal = partial(Decimal, context=Context(traps=[]))  # returns NaN instead of raising an error if the exponent is too large
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")  # name or owner/name


def is_file_name(path: str) -> bool:
    """Return whether a path names a file rather than a dataset: the file exists, or the name cannot be a dataset's."""
    with suppress(OSError):  # the path is longer than any valid file name
        if Path(path).exists():
            return not Path(path).is_dir()  # the datasets library reads a folder as a dataset
    return path.endswith(_FILE_ENDINGS) or not _HUB_NAME.fullmatch(path)


def read_problems(path: str, split: str, subset: str | None, *, own_reward: bool = False) -> list[Problem]:
    """Return the problems of a local file or of one split of a hub dataset, without duplicate questions.

    With ``own_reward``, the answers are left unchanged for the user's function and are equal only if their texts are equal.

    Raises:
        UserError: the data is missing or empty, a row is invalid, or two rows disagree; the message names the rows.
    """
    rows = _file_rows(path) if is_file_name(path) else _hub_rows(path, split, subset)
    cleaned, compared = (str, str) if own_reward else (without_thousands_separators, plain_answer)
    problems: dict[str, tuple[str, Problem]] = {}
    repeats, example = 0, ""
    for place, row in rows:
        problem = _problem(place, row, cleaned)
        earlier, kept = problems.setdefault(question_key(problem.question), (place, problem))
        if problem.answer != kept.answer and compared(problem.answer) != compared(kept.answer):
            answers = f"{shown(kept.answer)} and {shown(problem.answer)}"
            raise UserError(f"{earlier} and {place}: the same question has the answers {answers}; correct or remove one row")
        if problem is not kept:
            repeats, example = repeats + 1, example or f"{place} repeats the question of {earlier}"
    if not problems:
        raise UserError(f"{path}: no rows")
    if repeats:
        from rlzoo.core.zoo import log_once  # imports torch

        log_once(f"{example}; number of repeated rows, which are not used: {repeats:,}")  # every run of a sweep reads its data
    return [problem for _, problem in problems.values()]


def _file_rows(path: str) -> Iterator[tuple[str, Any]]:
    try:
        yield from _parquet_rows(path) if path.endswith(".parquet") else _json_rows(path)
    except FileNotFoundError:
        raise UserError(f"{path!r} is not a file (working directory: {Path.cwd()})") from None
    except UserError:
        raise
    except Exception as error:  # not text, not Parquet or an invalid file name; pyarrow has its own error classes
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UserError(f"{path}: cannot be read: {reason.splitlines()[0]}") from error


def _json_rows(path: str) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a JSON Lines file or of a file that contains a single JSON list."""
    text = read_text(path)
    if text.lstrip().startswith("["):
        for index, row in enumerate(_json(path, text)):
            yield f"{path} row {index}", row
        return
    for number, line in enumerate(text.split("\n"), start=1):  # not `splitlines`, because JSON strings may contain U+2028
        if line.strip():
            yield f"{path} line {number}", _json(f"{path} line {number}", line)


def _json(place: str, text: str) -> Any:
    try:
        return parse_json(text, parse_float=_decimal)
    except UnreadableError as error:
        raise UserError(f"{place}: not JSON: {error}") from error


def _parquet_rows(path: str) -> Iterator[tuple[str, Any]]:
    require_extra("datasets", "pyarrow")
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        batches = file.iter_batches(batch_size=1000, columns=_used(path, file.schema_arrow.names))
        yield from _numbered(path, (row for batch in batches for row in batch.to_pylist()), file.schema_arrow)


def _hub_rows(name: str, split: str, subset: str | None) -> Iterable[tuple[str, Any]]:
    require_extra("datasets", "datasets")
    import datasets

    try:
        subsets = datasets.get_dataset_config_names(name)
        chosen = subset or ("main" if "main" in subsets else None)  # main is the usual subset of GSM8K
        splits = datasets.get_dataset_split_names(name, chosen)
        rows = datasets.load_dataset(name, chosen, split=split) if split in splits else None
    except Exception as error:  # caused by the network, the name or the subset; error classes differ between versions
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{name!r} is not a file, and loading it as a hub dataset failed: {reason}") from error
    if rows is None:
        setting = "task.eval_path" if split == "test" else "task.path"
        advice = f"set {setting} to a file, or to a dataset that has this split"
        raise UserError(f"dataset {name!r} has no split {split!r} (available: {', '.join(splits)}); {advice}")
    # read in batches, because a dataset can be large (one has 1.8 million rows and repeats each question a hundred times)
    batches = rows.select_columns(_used(name, rows.column_names)).iter(batch_size=1000)
    columns = (dict(zip(batch, values, strict=True)) for batch in batches for values in zip(*batch.values(), strict=True))
    return _numbered(f"{name} {split}", columns, rows.features.arrow_schema)


def _numbered(place: str, rows: Iterable[Any], schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield each row of a table with a description of its position."""
    from pyarrow import struct

    kind = struct(schema)
    has_narrow_floats = "float" in str(kind)  # Arrow calls a 64-bit float a double
    for index, row in enumerate(rows):
        yield f"{place} row {index}", _shortest_floats(row, kind) if has_narrow_floats else row


def _shortest_floats(value: Any, kind: Any) -> Any:
    """Return a value of an Arrow type. Shorten 16- and 32-bit floats, even in structs, such as 0.10000000149 to 0.1."""
    from pyarrow import types

    if types.is_struct(kind) and isinstance(value, dict):
        return {name: _shortest_floats(inner, kind.field(name).type) for name, inner in value.items()}
    if types.is_floating(kind) and value is not None:
        return float(str(kind.to_pandas_dtype()(value)))  # NumPy prints the shortest decimal that rounds to the value
    return value


def _used(place: str, columns: Sequence[str]) -> list[str]:
    """Return the names of the columns to read from a table."""
    for wanted, names in (("question", _ASKING), ("answer", _ANSWERING)):
        if not set(columns) & set(names):
            raise _missing(place, columns, wanted)
    return [column for column in columns if column in (*_ASKING, *_ANSWERING)]


def _problem(place: str, row: Any, cleaned: Callable[[str], str]) -> Problem:
    if not isinstance(row, Mapping):
        raise UserError(f"{place}: expected an object with columns, got a {type(row).__name__}")
    question = _first(row, _ASKING)
    if isinstance(question, list):  # a list of messages
        asked = _said(question, "user")
        if len(asked) != 1:
            raise UserError(f"{place}: {len(asked)} user messages; expected exactly one, with the question")
        question = asked[0]
        if isinstance(question, str):
            question = question.removeprefix(_TEMPLATE_BEFORE).removesuffix(_TEMPLATE_AFTER)
    if question is None:
        raise _missing(place, row, "question")
    if not isinstance(question, str) or not question.strip():
        raise UserError(f"{place}: the question is {shown(question)}; expected a non-empty string")
    return Problem(question=question, answer=_answer(place, row, cleaned))


def _first(row: Mapping[str, Any], columns: Iterable[str]) -> Any:
    return next((row[column] for column in columns if row.get(column) is not None), None)


def _said(messages: object, role: str) -> list[object]:
    """Return the contents of all messages with the given role."""
    chat = messages if isinstance(messages, list) else []
    return [message.get("content") for message in chat if isinstance(message, Mapping) and message.get("role") == role]


def _answer(place: str, row: Mapping[str, Any], cleaned: Callable[[str], str]) -> str:
    written = _first(row, _ANSWERS)
    if written is None and isinstance(row.get("reward_model"), Mapping):
        written = row["reward_model"].get("ground_truth")
    if written is None:
        written = _worked_out(place, row)
    if isinstance(written, int | float | Decimal) and not isinstance(written, bool):
        written = _shortest_decimal(Decimal(str(written))) or written
    if not isinstance(written, str):
        raise UserError(f"{place}: the answer is {shown(written)}, not a string or a number")
    answer = clean_answer(written, cleaned)
    if not answer:
        raise UserError(f"{place}: the answer is empty")
    return answer


def _shortest_decimal(number: Decimal) -> str | None:
    """Return a number without an exponent or trailing zeros, or None if it is infinite, NaN or thousands of digits long."""
    if not number.is_finite() or abs(number.adjusted()) > LONGEST_ANSWER:
        return None
    text = format(number, "f")
    return (text.rstrip("0").removesuffix(".") if "." in text else text) if number else "0"


def _worked_out(place: str, row: Mapping[str, Any]) -> str:
    """Return the answer at the end of ``solution`` or the assistant's last message."""
    said = _said(row.get("messages"), "assistant")
    for where, text in (("solution", row.get("solution")), ("the assistant's message", said[-1] if said else None)):
        if not isinstance(text, str):
            continue
        if last_boxed(text) is not None or after_hashes(text) is not None:
            return text
        formula = _IN_DOLLARS.fullmatch(text.strip())  # TRL's DeepMath-103K contains "$0$" and "True" here
        if formula or len(text.split()) == 1:
            return formula[1] if formula else text
        raise UserError(f"{place}: no column 'answer', and {where} contains no \\boxed{{}} or ####")
    raise _missing(place, row, "answer")


def clean_answer(answer: str, cleaned: Callable[[str], str] = without_thousands_separators) -> str:
    r"""Apply ``cleaned`` to the text after GSM8K's ``####``, else the text in the last ``\boxed{}``, else the whole text.

    Example:
        >>> clean_answer("He pays 2 * 600 = 1,200.\n#### 1,200"), clean_answer("#### 3, -3")
        ('1200', '3, -3')
    """
    hashes = after_hashes(answer)
    boxed = last_boxed(answer) if hashes is None else hashes
    return cleaned(answer.strip() if boxed is None else boxed)


def _missing(place: str, columns: Iterable[str], wanted: str) -> UserError:
    present = ", ".join(map(str, columns)) or "none"
    return UserError(f"{place}: no column with the {wanted} (columns found: {present}; allowed: {_ALLOWED})")
