"""The text that MLflow shows at the top of a run: what it was, and what can be done with it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NOTE = "mlflow.note.content"
"""The tag that MLflow shows as a run's description."""

LONGEST = 7900
"""Characters of a description; MLflow takes 8000."""

LONGEST_COMMAND = 1500
ABSENT = "-"


def describe_run(
    title: str, *, command: str, usual: str, differences: Mapping[str, tuple[Any, Any]], directory: Path, host: str
) -> str:
    """A run in Markdown; indented lines are shown as they are.

    Args:
        title: what was run, in one line.
        command: that was typed, without secrets.
        usual: the command whose settings the run's are compared with.
        differences: by key, its setting there and in this run.
        directory: the run's.
        host: the machine the directory is on.
    """
    place = shlex.quote(str(directory))
    paragraphs = [
        title,
        _as_it_is(command[:LONGEST_COMMAND]),
        f"On `{host}`, it is resumed, judged by other rules, or done again with:",
        _as_it_is(
            f"rlzoo train --resume --output {place}",
            f"rlzoo replay {place} --clip NAME,NAME",
            f"rlzoo train --config {place}/config.yaml --output NEW",
        ),
        f"Differences to `{usual}`:" if differences else f"No differences to `{usual}`.",
        _as_it_is(*(f"{key}: {_json(value)} (default: {_json(before)})" for key, (before, value) in differences.items())),
    ]
    text = "\n\n".join(paragraphs)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def differences(usual: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """By key, what is another value here; a key that is only there says nothing."""
    return {key: (usual.get(key, ABSENT), value) for key, value in here.items() if key not in usual or usual[key] != value}


def _as_it_is(*lines: str) -> str:
    return "\n".join("    " + " ".join(line.split()) for line in lines)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
