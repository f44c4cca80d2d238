"""The cases of a part, their outcomes, and the file that stores the outcomes, so that an interrupted command can resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["passed", "failed", "measured", "absent", "stopped", "not run"]
DONE: tuple[Status, ...] = ("passed", "measured")
"""States of rows that are not run again when the command is repeated."""


class AbsentError(Exception):
    """Raised if a case needs something that this machine lacks."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The device on which the cases run, and their size."""

    device: Literal["cuda", "cpu"]
    quick: bool
    models: Path  # folder with the generated models

    @property
    def mark(self) -> str:
        """Return the device and the size, which identify the report."""
        import torch

        where = torch.cuda.get_device_name(0) if self.device == "cuda" else "CPU"
        return f"{where}, {'small' if self.quick else 'full size'}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a case."""

    found: str  # text for the page
    values: dict[str, Any] = field(default_factory=dict)
    passed: bool | None = None  # None for a measurement, which has no requirement


@dataclass(frozen=True, slots=True)
class Case:
    """A case, which becomes one row of the page.

    Example:
        ``Case("resume", "4 steps against 2 and 2", "bit for bit", resume)``
    """

    name: str
    about: str
    allowed: str  # the requirement; empty for a measurement
    run: Callable[[Setting], Outcome]


@dataclass(frozen=True, slots=True)
class Row:
    """A case with its outcome, as it is stored."""

    part: str
    name: str
    about: str
    allowed: str
    status: Status
    found: str
    mark: str = ""
    seconds: float = 0.0
    values: dict[str, Any] = field(default_factory=dict)


def read(file: Path) -> dict[str, Any]:
    """Return the report in a file, with its rows as `Row`, or an empty report if there is no file."""
    if not file.exists():
        return {"rows": []}
    report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return report | {"rows": [Row(**row) for row in report["rows"]]}


def write(file: Path, report: dict[str, Any]) -> None:
    """Write a report atomically, so that a reader never sees a partial file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    plain = report | {"rows": [asdict(row) for row in report["rows"]]}
    partial.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    partial.replace(file)
