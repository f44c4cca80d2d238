"""The text that MLflow shows at the top of a run: what it was, and what can be done with it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NOTE = "mlflow.note.content"
"""The tag that MLflow shows as a run's description."""

MOST_ROWS, LONGEST_VALUE, LONGEST_COMMAND = 30, 60, 1500  # MLflow takes 8000 characters in all
ABSENT = "-"


def describe_run(
    title: str, *, command: str, usual: str, differences: Mapping[str, tuple[Any, Any]], directory: Path, host: str
) -> str:
    """A run in Markdown.

    Args:
        title: what was run, in one line.
        command: that was typed, without secrets.
        usual: the command whose settings the run's are compared with.
        differences: by key, its setting there and in this run.
        directory: the run's.
        host: the machine the directory is on.
    """
    place = shlex.quote(str(directory))
    return "\n".join(
        [
            title,
            "",
            _block(command),
            "",
            *_table(usual, differences),
            "",
            f"Run directory {_code(str(directory))} on {_code(host)}:",
            "",
            f"- {_code(f'rlzoo train --resume --output {place}')} goes on with it after it was stopped",
            f"- {_code(f'rlzoo replay {place} --clip NAME,NAME')} judges its rollouts by other rules",
            f"- {_code(f'rlzoo train --config {place}/config.yaml --output NEW')} does it again",
        ]
    )


def differences(usual: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """By key, what is another value here; a key that is only there says nothing."""
    return {key: (usual.get(key, ABSENT), value) for key, value in here.items() if key not in usual or usual[key] != value}


def _table(usual: str, different: Mapping[str, tuple[Any, Any]]) -> list[str]:
    if not different:
        return [f"No differences to {_code(usual)}."]
    rows = [f"| {_code(key)} | {_cell(before)} | {_cell(value)} |" for key, (before, value) in different.items()]
    left_out = len(rows) - MOST_ROWS
    more = [f"\n{left_out} more in `config.yaml`." if left_out > 1 else ""]
    shown = rows[:MOST_ROWS] if left_out > 1 else rows
    return [f"Differences to {_code(usual)}:", "", "| setting | default | this run |", "|---|---|---|", *shown, *more]


def _cell(value: Any) -> str:
    text = "null" if value is None else str(value)
    return ABSENT if text == ABSENT else _code(text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}...")


def _code(text: str) -> str:
    """A text as it is, in a line and in a table's cell."""
    line = " ".join(text.split()).replace("|", "\\|")
    if "`" not in line:
        return f"`{line}`"
    fence = "`" * (1 + max(len(run) for run in re.findall("`+", line)))
    return f"{fence} {line} {fence}"


def _block(text: str) -> str:
    text = text if len(text) <= LONGEST_COMMAND else f"{text[: LONGEST_COMMAND - 3]}..."
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}"
