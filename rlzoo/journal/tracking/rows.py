"""Sends the metric rows that a run appends to a file, in order and exactly once."""

from __future__ import annotations

import json
import posixpath
import re
import zlib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

LARGEST_CALL = 1000  # maximum number of metrics in one call, which is MLflow's own limit

LEFT_OUT = ("learner/objective", "eval/accuracy_se", "fairness/lre_composition_mean", "fairness/lre_total_mean")
"""Prefixes of metrics that are not sent, because they are not useful as curves. Intervals are sent only for `rlzoo eval`."""

BY_BIN = ("clip/fraction_length_bin_", "clip/fraction_num_turns_bin_", "clip/band_", "fairness/ess_length_bin_")
"""Prefixes of metrics for bins of length or number of turns that are sent. Others are only in ``metrics.jsonl``."""


class Lines:
    """Reads the rows that are appended to a file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.offset = 0  # offset of the first unread byte

    def added(self) -> list[dict[str, float]]:
        """Read the complete lines that were added since the last call."""
        if not self.file.exists():
            return []
        with self.file.open("rb") as stream:
            stream.seek(self.offset)
            complete, newline, _ = stream.read().rpartition(b"\n")
        self.offset += len(complete + newline)
        return [json.loads(line) for line in complete.splitlines()]


class Points:
    """Sends the rows that a store does not have yet.

    The last step of a metric in the store determines which rows are missing. After an error, it is not known which rows have
    arrived. In that case, create a new object, which queries the store again.
    """

    def __init__(self, client: Any, run_id: str) -> None:
        self._client, self._run_id = client, run_id
        self._last: dict[str, int] = {}  # last step of each metric in the store

    def send(self, rows: Iterable[Mapping[str, float]]) -> int:
        """Send the rows that the store does not have, and return their number. Rows must be in order."""
        new = [points(row) for row in rows if self._is_new(row)]
        size = max(1, LARGEST_CALL // max(map(len, new), default=1))
        for start in range(0, len(new), size):  # a call may fail, so each call sends whole rows
            batch = [point for row in new[start : start + size] for point in row]
            self._client.log_batch(self._run_id, metrics=batch, synchronous=True)
        return len(new)

    def _is_new(self, row: Mapping[str, float]) -> bool:
        name = next(iter(curves(row)), None)
        if name is not None and name not in self._last:
            history = self._client.get_metric_history(self._run_id, accepted_name(name))
            self._last[name] = max((point.step for point in history), default=-1)
        return name is not None and row["step"] > max(self._last.values())


def curves(row: Mapping[str, float]) -> dict[str, float]:
    """From a row, return the metrics that should be sent."""
    return {key: row[key] for key in row if key not in ("step", "time/clock") and is_curve(key)}


def is_curve(name: str) -> bool:
    """Whether a metric is useful as a curve."""
    if (name.endswith(("_ci_low", "_ci_high")) and not name.startswith("eval/")) or name.startswith(LEFT_OUT):
        return False
    return not any(kind in name for kind in ("length_bin_", "num_turns_bin_")) or name.startswith(BY_BIN)


def points(row: Mapping[str, float]) -> list[Any]:
    """Convert a row to MLflow metrics."""
    from mlflow.entities import Metric

    stamp, step = int(row.get("time/clock", 0.0) * 1000), int(row["step"])
    return [Metric(accepted_name(key), value, stamp, step) for key, value in curves(row).items()]


@cache
def accepted_name(name: str) -> str:
    """Return a name in a form that MLflow accepts. A changed name ends with a checksum, so that no two metrics share it."""
    is_path = posixpath.normpath(f"/{name}") == f"/{name}" and not name.startswith(("/", ".."))
    if is_path and re.fullmatch(r"[/\w.\- :]{1,250}", name):
        return name
    plain = posixpath.normpath("/" + re.sub(r"[^/\w.\- :]", "_", name)).lstrip("/.")[:240]
    return f"{plain}-{zlib.crc32(name.encode(errors='replace')):08x}"
