"""The directory of an evaluation: its settings, every completion as it is made, and what they came to."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from rlzoo.errors import UserError
from rlzoo.measure.at_k import GradedProblem
from rlzoo.support.atomic import temporary_path, write_text
from rlzoo.support.parsing import parse_json, parse_yaml
from rlzoo.support.reading import RECORDS, SETTINGS, read_bytes, read_text
from rlzoo.types import Problem


@dataclass(frozen=True, slots=True)
class Completion:
    r"""One graded response.

    Example:
        ``Completion("so it is \\boxed{18}", reward=1.0, answer_group=0, length=12, finished=True)``
    """

    response: str
    reward: float
    answer_group: int | None  # place of the first response to the problem with the same answer; None: no answer
    length: int  # in tokens, the end token included
    finished: bool  # False: cut off at the length limit


_COMPLETIONS = TypeAdapter(tuple[Completion, ...])


@dataclass(frozen=True, slots=True)
class Answered:
    """A problem with its k completions: one line of ``completions/<suite>.jsonl``.

    Example:
        ``Answered(Problem("1+1?", "2"), (Completion("2", 1.0, 0, 2, True),))``
    """

    problem: Problem
    completions: tuple[Completion, ...]

    @property
    def outcome(self) -> GradedProblem:
        """What the estimators read."""
        return GradedProblem(
            rewards=tuple(completion.reward for completion in self.completions),
            groups=tuple(completion.answer_group for completion in self.completions),
            lengths=tuple(completion.length for completion in self.completions),
        )

    def to_line(self, index: int) -> str:
        """As a line of JSON, the same for the same content."""
        completions = [asdict(completion) for completion in self.completions]
        row = {"problem": index, "question": self.problem.question, "answer": self.problem.answer, "completions": completions}
        return json.dumps(row, ensure_ascii=False) + "\n"

    @classmethod
    def from_line(cls, line: str) -> Answered:
        """The same from such a line."""
        row = parse_json(line)
        return cls(Problem(row["question"], row["answer"]), _COMPLETIONS.validate_python(row["completions"]))


@dataclass(frozen=True, slots=True)
class EvaluationDirectory:
    """Where an evaluation leaves everything, and finds it again when the same command is started again.

    Example:
        ``EvaluationDirectory(Path("evals/mine")).read("gsm8k", problems)``
    """

    path: Path

    def check(self, settings: Mapping[str, Any]) -> None:
        """Refuse a directory that holds something else, or an evaluation with other settings, before any time is spent.

        Raises:
            UserError: one line that says which settings differ.
        """
        file = self.path / "settings.yaml"
        try:
            before = parse_yaml(read_text(file, SETTINGS)) if file.is_file() else None
            is_taken = before is None and self.path.exists() and not (self.path.is_dir() and self._is_free(settings))
        except (OSError, ValueError) as error:
            raise UserError(f"{str(file)!r} cannot be read: {error}") from error
        if is_taken:
            raise UserError(f"--output {str(self.path)!r} is not an evaluation's directory; name another, or remove it")
        changed = list(_differences(before, settings)) if isinstance(before, Mapping) else []
        if changed:
            raise UserError(
                f"--output {str(self.path)!r} was begun with another {', '.join(changed[:3])}; "
                "give the same settings to go on, or name another --output"
            )

    def create(self, settings: Mapping[str, Any]) -> None:
        """Make the directory with its ``settings.yaml``, if it is not there yet.

        Raises:
            UserError: it cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # with this file it is the directory of an evaluation
            write_text(self.path / "settings.yaml", _as_yaml(settings), _key(_as_yaml(settings)))
            (self.path / "completions").mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(f"--output {str(self.path)!r} cannot be written: {error.strerror or error}") from error

    def _is_free(self, settings: Mapping[str, Any]) -> bool:
        """Whether it is empty, except for what the same evaluation left when it was killed while it wrote its settings."""
        unfinished = temporary_path(self.path / "settings.yaml", _key(_as_yaml(settings)))
        return all(path == unfinished for path in self.path.iterdir())

    def read(self, suite: str, problems: Sequence[Problem]) -> list[Answered]:
        """The problems that are answered already, at most those asked for; a line that was not finished is cut off.

        Raises:
            UserError: they are not the problems of the suite as it is now.
        """
        file = self._file(suite)
        if not file.is_file():
            return []
        content = read_bytes(file, RECORDS)
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:  # whoever wrote it was killed
            with file.open("r+b") as stream:
                stream.truncate(len(whole))
        lines = whole.split(b"\n")[: len(problems)]  # not splitlines: JSON strings may hold U+2028
        answered: list[Answered] = []
        for number, (line, problem) in enumerate(zip(lines, problems, strict=False), start=1):
            if not line:
                break  # after the last
            try:
                answered.append(Answered.from_line(line.decode()))
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"{file} line {number}: not a completion of an evaluation; remove the file to begin anew"
                ) from error
            if not _fits(answered[-1].completions, len(answered[0].completions)):
                raise UserError(f"{file} line {number}: not the completions that the first has; remove the file to begin anew")
            if answered[-1].problem != problem:
                raise UserError(
                    f"{file} line {number} answers another question than suite {suite!r} has; name another --output"
                )
        return answered

    def append(self, suite: str, start: int, answered: Sequence[Answered]) -> None:
        """Add whole problems, the first of which is the suite's number ``start``; on the disk before this returns."""
        lines = "".join(item.to_line(start + place) for place, item in enumerate(answered))
        with self._file(suite).open("ab") as file:
            file.write(lines.encode())
            file.flush()
            os.fsync(file.fileno())

    def save_results(self, results: Mapping[str, Any]) -> None:
        """Write ``results.json``."""
        settings = read_text(self.path / "settings.yaml", SETTINGS)
        write_text(self.results_file, json.dumps(results, indent=2) + "\n", _key(settings))

    def read_results(self) -> dict[str, Any]:
        """What ``results.json`` holds; empty before the first."""
        try:
            return dict(parse_json(read_text(self.results_file, RECORDS)))
        except (OSError, ValueError, TypeError):
            return {}

    @property
    def results_file(self) -> Path:
        """``results.json``."""
        return self.path / "results.json"

    def _file(self, suite: str) -> Path:
        return self.path / "completions" / f"{suite}.jsonl"


def _as_yaml(settings: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(settings), sort_keys=False)


def _key(settings: str) -> str:
    """What the temporary files of an evaluation with these settings are known by."""
    return hashlib.sha256(settings.encode()).hexdigest()


def _fits(completions: Sequence[Completion], number: int) -> bool:
    """Whether an evaluation of so many responses to a problem could have written them."""
    places = [item.answer_group for item in completions if item.answer_group is not None]
    values = all(math.isfinite(item.reward) and item.length >= 0 for item in completions)
    return len(completions) == number > 0 and values and all(0 <= place < number for place in places)


def _differences(before: Mapping[str, Any], asked: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key in dict.fromkeys((*before, *asked)):
        old, new = before.get(key), asked.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differences(old, new, f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key} ({old} there, {new} asked)"
