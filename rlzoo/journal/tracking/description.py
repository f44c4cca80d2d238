"""The description of a run in MLflow: its command without secrets, and the commands that resume and replay it."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from rlzoo.config.redaction import REDACTED, redact, redact_settings
from rlzoo.support.parsing import parse_yaml

COMMAND = "RLZOO_COMMAND"  # environment variable with the user's command, for processes that a launcher starts
NOTE = "mlflow.note.content"  # the tag that MLflow shows as a run's description
LONGEST_COMMAND = 1500  # maximum number of characters; MLflow's limit for a description is 8000


def describe_run(title: str, directory: Path) -> str:
    """Describe a run in Markdown, with its title, its command, and the commands that resume and replay it."""
    place = shlex.quote(str(directory))
    command = _as_it_is(typed_command()[:LONGEST_COMMAND])
    advice = f"On `{socket.gethostname()}`, resume the run, or replay it with other rules:"
    others = _as_it_is(f"rlzoo train --resume --output {place}", f"rlzoo replay {place} --clip NAME,NAME")
    return "\n\n".join((title, command, advice, others))


def _as_it_is(*lines: str) -> str:
    return "\n".join("    " + " ".join(line.splitlines()) for line in lines)


def typed_command() -> str:
    """Return the command line of this process or its launcher, without secrets."""
    return os.environ.get(COMMAND) or shlex.join(redact_words([*_program(sys.argv[0]), *sys.argv[1:]]))


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
    """Whether a value is or contains a secret. The value may be YAML with nested keys."""
    try:
        value = parse_yaml(text)
    except ValueError:
        value = text
    settings = {name.lstrip("-"): value}
    return redact_settings(settings) != settings


def _program(path: str) -> list[str]:
    """Return the words that start the program at ``path`` on a command line, such as ``["python", "train.py"]``."""
    file = Path(path)
    if "rlzoo" in (file.name, file.parent.name):
        return ["rlzoo"]
    if file.name == "__main__.py":
        return ["python", "-m", file.parent.name]
    return ["python", path] if file.suffix == ".py" else ["python"] if path in ("", "-c", "-m") else [file.name]
