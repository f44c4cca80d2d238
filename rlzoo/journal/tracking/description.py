"""The description of a run in MLflow: its command without secrets, commands to resume it, and its settings."""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlzoo.config.redaction import REDACTED, redact, redact_settings
from rlzoo.support.parsing import parse_yaml

COMMAND = "RLZOO_COMMAND"  # environment variable with the user's command, for processes that a launcher starts
NOTE = "mlflow.note.content"  # the tag that MLflow shows as a run's description
LONGEST = 7900  # maximum number of characters in a description; MLflow's limit is 8000

LONGEST_COMMAND = 1500
ABSENT = "-"


def describe_run(title: str, usual: str, differences: Mapping[str, tuple[Any, Any]], directory: Path) -> str:
    """Describe a run in Markdown, and list the settings that differ from those of the command ``usual``."""
    place = shlex.quote(str(directory))
    paragraphs = [
        title,
        _as_it_is(typed_command()[:LONGEST_COMMAND]),
        f"On `{socket.gethostname()}`, resume the run, replay it with other rules, or repeat it with:",
        _as_it_is(
            f"rlzoo train --resume --output {place}",
            f"rlzoo replay {place} --clip NAME,NAME",
            f"rlzoo train --config {shlex.quote(str(directory / 'config.yaml'))} --output NEW",
        ),
        f"Differences from `{usual}`:" if differences else f"No differences from `{usual}`.",
        _as_it_is(*(f"{key}: {json.dumps(here)} (default: {json.dumps(there)})" for key, (there, here) in differences.items())),
    ]
    text = "\n\n".join(paragraphs)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def differences(usual: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return each differing setting with its usual and its current value; keys that occur only in ``usual`` are ignored."""
    return {key: (usual.get(key, ABSENT), value) for key, value in here.items() if key not in usual or usual[key] != value}


def _as_it_is(*lines: str) -> str:
    return "\n".join("    " + " ".join(line.splitlines()) for line in lines)


def typed_command() -> str:
    """Return the command line of this process, or of its launcher, without secrets."""
    return os.environ.get(COMMAND) or shlex.join(redact_words([*_program(sys.argv[0]), *sys.argv[1:]]))


def source_name() -> str:
    """Return the source of a run for MLflow: the command, such as ``rlzoo train``, or the script's file."""
    words = shlex.split(typed_command())
    if words[:1] == ["rlzoo"]:
        return " ".join(word for word in words[:2] if not word.startswith("-"))
    return words[1] if len(words) > 1 and words[1].endswith(".py") else " ".join(words[:3])


def redact_words(words: Sequence[str]) -> list[str]:
    """Redact the secrets in a command, including the values in ``KEY=VALUE`` and ``--key VALUE`` if the key names a secret.

    Example:
        >>> redact_words(["--set", "judge.api_key=my key", "--password", "abc"])
        ['--set', 'judge.api_key=<redacted>', '--password', '<redacted>']
    """
    shown, before = [], ""
    for word in words:
        key, equals, value = word.partition("=")
        if equals and _is_secret(key, value):
            shown.append(f"{key}={REDACTED}")
        elif before.startswith("-") and not word.startswith("-") and _is_secret(before, word):
            shown.append(REDACTED)
        else:
            shown.append(redact(word))
        before = word
    return shown


def _is_secret(name: str, text: str) -> bool:
    """Whether a value is or contains a secret; the value may be YAML with nested keys."""
    try:
        value = parse_yaml(text)
    except ValueError:
        value = text
    settings = {name.lstrip("-"): value}
    return redact_settings(settings) != settings


def _program(path: str) -> list[str]:
    """Return the words with which a command starts the program at ``path``, such as ``["python", "train.py"]``."""
    file = Path(path)
    if "rlzoo" in (file.name, file.parent.name):
        return ["rlzoo"]
    return ["python", path] if file.suffix == ".py" else ["python"]
