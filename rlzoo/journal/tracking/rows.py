"""Rows of numbers that a run appends to a file, sent as curves: in order, each once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

LARGEST_CALL = 1000  # metrics, MLflow's own limit

Curves = Literal["curated", "all"]
"""Which metrics of a step are sent: all of them, or those that somebody looks at as a curve."""

LEFT_OUT = ("ratio/standardised_", "learner/objective")
"""What is not curated beside the ends of intervals: quantiles, and the loss with another sign."""

BY_LENGTH = ("clip/fraction_length_bin_", "clip/band_", "fairness/ess_length_bin_")
"""What is curated of the metrics by length; the others are read off ``metrics.jsonl``."""


class Rows:
    """A file of rows that grows; what was read and not sent is kept.

    Example:
        ``for step, number in Rows(file, "all").send(client, run_id, after=-1): ...``
    """

    def __init__(self, file: Path, kind: Curves) -> None:
        self._file = file
        self._kind: Curves = kind
        self._offset = 0
        self._waiting: list[dict[str, float]] = []
        self._is_sure = False  # whether the store has none of the rows that wait

    def send(self, client: Any, run_id: str, after: int) -> Iterator[tuple[int, int]]:
        """Send what was added.

        Args:
            client: of the store.
            run_id: of the run there.
            after: the last step that is known to have been sent.

        Yields:
            The last step the store has, and how many rows it was sent, after every call.
        """
        self._waiting += [row for row in self._read() if row["step"] > after]
        # rows that were sent by a process that was killed before it wrote that down, or by a call whose answer was lost
        while not self._is_sure and self._waiting and has_point(client, run_id, self._waiting[0], self._kind):
            yield int(self._waiting.pop(0)["step"]), 0
        self._is_sure = True
        while self._waiting:
            number = 0
            metrics: list[Any] = []
            while number < len(self._waiting):
                more = points(self._waiting[number], self._kind)
                if metrics and len(metrics) + len(more) > LARGEST_CALL:
                    break
                metrics += more
                number += 1
            self._is_sure = False
            client.log_batch(run_id, metrics=metrics)
            self._is_sure = True
            step = int(self._waiting[number - 1]["step"])
            del self._waiting[:number]
            yield step, number

    def _read(self) -> Iterator[dict[str, float]]:
        """Whole lines that were added since the last time."""
        if not self._file.exists():
            return
        with self._file.open("rb") as stream:
            stream.seek(self._offset)
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield json.loads(line)


def curves(row: Mapping[str, float], kind: Curves) -> dict[str, float]:
    """What is sent of a row."""
    own = ("step", "time/clock")
    return {key: row[key] for key in row if key not in own and (kind == "all" or is_curated(key))}


def is_curated(name: str) -> bool:
    """Whether a metric is looked at as a curve."""
    if name.endswith(("_ci_low", "_ci_high")) or name.startswith(LEFT_OUT):
        return False
    return "length_bin_" not in name or name.startswith(BY_LENGTH)


def points(row: Mapping[str, float], kind: Curves) -> list[Any]:
    """A row as MLflow's metrics."""
    from mlflow.entities import Metric

    stamp, step = int(row.get("time/clock", 0.0) * 1000), int(row["step"])
    return [Metric(key, value, stamp, step) for key, value in curves(row, kind).items()]


def has_point(client: Any, run_id: str, row: Mapping[str, float], kind: Curves) -> bool:
    """Whether the store has this row."""
    names = curves(row, kind)
    history = client.get_metric_history(run_id, next(iter(names))) if names else []
    return not names or any(metric.step == row["step"] for metric in history)
