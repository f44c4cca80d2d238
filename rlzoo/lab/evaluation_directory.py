"""The directory of an evaluation, which holds its settings, all completions, and the results."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rlzoo.core.errors import UserError
from rlzoo.lab.runs import changed_settings
from rlzoo.measure.at_k import Completions
from rlzoo.support.atomic import write_text
from rlzoo.support.lock import FILE as LOCK
from rlzoo.support.lock import Lock
from rlzoo.support.parsing import dump_yaml, parse_json, parse_yaml
from rlzoo.support.reading import read_text
from rlzoo.tasks.problem import Problem


@dataclass(frozen=True, slots=True)
class Answered:
    """A problem with its k completions, stored as one line of ``completions/<suite>.jsonl``."""

    question: str
    answer: str
    completions: Completions

    def to_line(self, index: int) -> str:
        """Format the problem and its completions as one line of JSON."""
        return json.dumps({"problem": index, **asdict(self)}, ensure_ascii=False) + "\n"


_ANSWERED = TypeAdapter(Answered)


@dataclass(frozen=True, slots=True)
class EvaluationDirectory:
    """The files of an evaluation, from which the command resumes if it is rerun."""

    path: Path

    def check(self, settings: Mapping[str, Any]) -> None:
        """Reject a directory with other content or an evaluation with different settings, before any work starts."""
        if (before := self.settings()) is not None and (changed := changed_settings(before, settings)):
            what = ", ".join(changed[:3]).replace("rollout.group_size", "--k")
            where = f"--output {str(self.path)!r} was created with different settings"
            raise UserError(f"{where}: {what}; use the same settings to resume, or choose another --output")

    def settings(self) -> Mapping[str, Any] | None:
        """Return the stored settings, or None if the directory is missing or empty; raise `UserError` for any other content."""
        file = self.path / "settings.yaml"
        try:
            if not self.path.exists() or (self.path.is_dir() and {file.name for file in self.path.iterdir()} <= {LOCK}):
                return None
            stored = parse_yaml(read_text(file)) if file.is_file() else None
        except (OSError, ValueError) as error:
            raise UserError(f"{str(file)!r} cannot be read: {error}") from error
        if not isinstance(stored, Mapping):
            raise UserError(f"{str(self.path)!r} is not an evaluation directory; choose another, or remove it")
        return stored

    def create(self, settings: Mapping[str, Any]) -> Lock:
        """Create or reopen the directory and return its lock; raise `UserError` on failure or if another process uses it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = Lock(self.path)
            try:
                self.check(settings)
                write_text(self.path / "settings.yaml", dump_yaml(dict(settings)), "evaluation")
                (self.path / "completions").mkdir(exist_ok=True)
            except BaseException:
                lock.release()
                raise
        except OSError as error:
            raise UserError(f"--output {str(self.path)!r} cannot be written: {error.strerror or error}") from error
        return lock

    def read(self, suite: str, problems: Sequence[Problem], *, repair: bool = True) -> list[Answered]:
        """Read the completions of all answered problems. ``repair`` removes an incomplete last line from the file.

        Raises:
            UserError: a line is damaged or belongs to a different problem.
        """
        file = self._file(suite)
        if not file.is_file():
            return []
        content = file.read_bytes()
        *lines, torn = content.split(b"\n")  # not `splitlines`, because JSON strings may contain U+2028
        if torn and repair:  # the writer was killed
            os.truncate(file, len(content) - len(torn))
        answered: list[Answered] = []
        for number, (line, problem) in enumerate(zip(lines, problems, strict=False), start=1):
            try:
                answered.append(_ANSWERED.validate_python(parse_json(line.decode())))
            except ValueError as error:
                raise UserError(
                    f"{file} line {number} is not a record of completions; remove the file to start over"
                ) from error
            completions, k = answered[-1].completions, len(answered[0].completions)
            groups = [completion.answer_group or 0 for completion in completions]
            if not 0 < len(completions) == k > max(groups):
                raise UserError(f"{file} line {number} is inconsistent with line 1; remove the file to start over")
            if (answered[-1].question, answered[-1].answer) != (problem.question, problem.answer):
                raise UserError(f"{file} line {number} does not match the problem in suite {suite!r}; choose another folder")
        return answered

    def append(self, suite: str, start: int, answered: Sequence[Answered]) -> None:
        """Append fully answered problems, starting at index ``start``. The data is on disk when the method returns."""
        lines = "".join(item.to_line(start + place) for place, item in enumerate(answered))
        with self._file(suite).open("ab") as file:
            file.write(lines.encode())
            file.flush()
            os.fsync(file.fileno())

    def _file(self, suite: str) -> Path:
        return self.path / "completions" / f"{suite}.jsonl"
