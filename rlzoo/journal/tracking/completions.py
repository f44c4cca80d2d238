"""Sampled completions of a run, as a table that MLflow shows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlzoo.errors import UserError, shown
from rlzoo.support.parsing import parse_json

TABLE = "completions.json"
COLUMNS = ("question", "answer", "response", "reward", "length")
LOGGED = "mlflow.loggedArtifacts"
"""The tag by which MLflow knows an artifact for a table."""


def table_of(directory: Path, number: int) -> str:
    """The table as MLflow reads it; empty if nothing was recorded."""
    rows = list(sampled_completions(directory, number))
    return json.dumps({"columns": list(rows[0]), "data": [list(row.values()) for row in rows]}) if rows else ""


def sampled_completions(directory: Path, number: int) -> Iterator[dict[str, Any]]:
    """The first responses to the first ``number`` prompts of every step, from the recorded rollouts."""
    for file in sorted((directory / "rollouts").glob("[0-9]*.jsonl")) if number else ():
        seen = -1
        if not file.stem.isdecimal():
            continue
        with file.open("rb") as stream:
            for line_number, line in enumerate(stream, start=1):
                row = _response(line, f"{file} line {line_number}")
                if row["group"] >= number:
                    break
                if row["group"] != seen:
                    seen = row["group"]
                    yield {"step": int(file.stem), **{name: row.get(name) for name in COLUMNS}}


def _response(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = parse_json(line.decode())
    except ValueError as error:
        raise UserError(f"{place}: not a recorded response: {error}") from error
    if not isinstance(row, dict) or not isinstance(row.get("group"), int):
        raise UserError(f"{place}: not a recorded response: {shown(row)} has no group")
    return row
