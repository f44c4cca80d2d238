"""Finished runs, read from their directories: settings, metrics and what was noted at the end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rlzoo.errors import UserError, shown
from rlzoo.journal.run_directory import read_metrics
from rlzoo.journal.tracking.record import flatten
from rlzoo.support.parsing import parse_json, parse_yaml
from rlzoo.support.reading import SETTINGS, read_text


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A finished run.

    Example:
        ``record.metrics[-1]["eval/accuracy"]`` is the last evaluation.
    """

    path: Path
    settings: Mapping[str, Any]  # its config.yaml with dotted keys
    metrics: tuple[Mapping[str, float], ...]
    summary: Mapping[str, Any]

    @property
    def policy(self) -> str:
        """Its clip policy's name."""
        return str(self.settings["clip.name"])

    @property
    def seed(self) -> int:
        """Its seed."""
        return int(self.settings["seed"])

    def last(self, name: str) -> float | None:
        """The last value of a metric."""
        return next((row[name] for row in reversed(self.metrics) if name in row), None)

    def mean(self, name: str, last_share: float = 1.0) -> float | None:
        """Mean of a metric over the run, or over the last part of its steps."""
        first = self.settings["steps"] * (1 - last_share)
        values = [row[name] for row in self.metrics if name in row and row["step"] > first]
        return fmean(values) if values else None

    def score(self, name: str) -> float:
        """Accuracy at the end on held-out problems, or mean reward over the last quarter of the steps."""
        value = self.last(name) if name == "eval/accuracy" else self.mean(name, 0.25)
        assert value is not None, "a finished run has rewards, and accuracy is the score only where every run has it"
        return value

    @property
    def gain(self) -> float | None:
        """Accuracy at the end less accuracy before the first update; None without an evaluation."""
        values = [row["eval/accuracy"] for row in self.metrics if "eval/accuracy" in row]
        return values[-1] - values[0] if values else None

    @property
    def seconds(self) -> float:
        """How long it took; of a run that did not note it, sampling and learning alone."""
        spent = sum(row.get("time/rollout", 0.0) + row.get("time/learner", 0.0) for row in self.metrics)
        noted = self.summary.get("seconds")
        return float(noted) if isinstance(noted, int | float) and 0 < noted < math.inf else spent


def find_runs(paths: Sequence[Path]) -> tuple[list[RunRecord], list[str]]:
    """Every finished run in some folders, at any depth, and a note on each that is not finished.

    Raises:
        UserError: a path is no folder, or there is no finished run.
    """
    folders: dict[Path, Path] = {}  # where it lies, and how it was named first
    for path in paths:
        if not _is_folder(path):
            raise UserError(f"{shown(str(path))} is not a folder; give run directories, or folders that hold some")
        found = [file.parent for file in sorted(path.rglob("config.yaml")) if _is_run(file.parent)]
        for folder in found:
            if "interrupted" not in folder.relative_to(path).parts:
                folders.setdefault(folder.resolve(), folder)
    records, notes = [], []
    for folder in folders.values():
        try:
            record = _read(folder)
        except UserError as error:
            notes.append(f"left out, damaged: {error}")
            continue
        if record is None:
            notes.append(f"left out, not finished: {folder}")
        else:
            records.append(record)
    if not records:
        why = f" ({notes[0]})" if notes else ""
        raise UserError(f"no finished run in {', '.join(map(str, paths))}{why}; `rlzoo sweep` or `rlzoo train` make some")
    return records, notes


def _is_run(folder: Path) -> bool:
    """Whether a folder with a config.yaml is a run's: a run has begun to write there."""
    return (folder / "rollouts").is_dir() or (folder / "metrics.jsonl").is_file()


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # a name that nothing can have
        return False


def _read(folder: Path) -> RunRecord | None:
    """The run in a folder; None if it has not come to its last step.

    Raises:
        UserError: what it wrote is damaged.
    """
    settings = _settings(folder / "config.yaml")
    if settings is None or not (folder / "metrics.jsonl").is_file():
        return None
    summary = _summary(folder / "summary.json")
    if type(summary.get("steps")) is int:
        settings["steps"] = max(settings["steps"], summary["steps"])  # more, if it was resumed with more
    metrics = tuple(read_metrics(folder / "metrics.jsonl"))
    if not metrics or metrics[-1]["step"] != settings["steps"]:
        return None
    if not any("reward/mean" in row and row["step"] > settings["steps"] * 0.75 for row in metrics):
        raise UserError(f"{str(folder / 'metrics.jsonl')!r} has no reward/mean in the last quarter of its steps")
    return RunRecord(folder, settings, metrics, summary) if summary.get("finished", True) else None


def _settings(file: Path) -> dict[str, Any] | None:
    """A run's configuration with dotted keys; None if it is none."""
    try:
        content = parse_yaml(read_text(file, SETTINGS))
    except (OSError, ValueError):
        return None
    settings = flatten(content) if isinstance(content, Mapping) else {}
    named = isinstance(settings.get("clip.name"), str)
    return settings if named and all(type(settings.get(key)) is int for key in ("steps", "seed")) else None


def _summary(file: Path) -> dict[str, Any]:
    """What a run noted at its end; nothing if it cannot be read."""
    try:
        found = parse_json(read_text(file, SETTINGS))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
