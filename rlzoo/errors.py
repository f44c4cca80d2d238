"""The exceptions that are one clear line, by who can mend what; and how a settings error becomes such a line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError


class UserError(ValueError):
    """A mistake in what the user gave: says what was given, what is allowed, and what to do.

    The command line prints it as one line and exits with code 2.
    """


class RunError(RuntimeError):
    """A run cannot go on, and says why and how to go on later: a full disk, a reward that fails, gradients without end.

    The command line prints it as one line and exits with code 1.
    """


class PolicyError(RuntimeError):
    """A clip policy broke its contract in a run: names the policy and what was wrong.

    The command line prints it as one line and exits with code 1.
    """

    def __init__(self, policy: str, problem: str) -> None:
        super().__init__(f"clip policy {policy!r} {problem}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'lr'?"`` for the closest of the known words, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def explain(error: ValidationError, model: type[BaseModel], prefix: str = "") -> str:
    """The first mistake of a pydantic error as one line: the key, what was given, what is allowed.

    Args:
        error: raised by ``model``.
        model: the settings class, for the keys it allows.
        prefix: where the settings stand in the run's configuration, such as ``"clip."``.
    """
    first = error.errors()[0]
    location = [str(part) for part in first["loc"]]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, UserError):
        return str(cause)
    key = prefix + ".".join(location)
    if first["type"] == "extra_forbidden":
        section = _section(model, location[:-1])
        allowed = list(section.model_fields) if section else []
        return f"unknown key {key!r} (allowed: {', '.join(allowed)}){did_you_mean(location[-1], allowed)}"
    message = str(cause or first["msg"])
    if not location:
        return f"{prefix.rstrip('.')}: {message}".lstrip(": ")
    if first["type"] == "missing":
        return f"{key} is missing"
    return f"{key}={first['input']!r}: {message[0].lower()}{message[1:]}"


def _section(model: type[BaseModel], location: list[str]) -> type[BaseModel] | None:
    section: type[BaseModel] | None = model
    for part in location:
        field = section.model_fields.get(part) if section else None
        inner: Any = field.annotation if field else None
        section = inner if hasattr(inner, "model_fields") else None
    return section
