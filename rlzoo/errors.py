"""Exceptions whose message is one clear line, by who can fix the cause; and how a settings error becomes such a line."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError


LONGEST_MESSAGE = 2000  # characters: about what a screen shows
_LONGEST_VALUE = 200

_shortened = reprlib.Repr()
_shortened.maxlevel, _shortened.maxstring, _shortened.maxother = 6, _LONGEST_VALUE, _LONGEST_VALUE
_shortened.maxdict = _shortened.maxlist = _shortened.maxtuple = _shortened.maxset = _shortened.maxlong = 40


class UserError(ValueError):
    """A mistake in what the user gave: says what was given, what is allowed, and what to do.

    The command line prints it as one line and exits with code 2. So it is one line, whatever was given: control characters
    are written as escapes, and of a message longer than `LONGEST_MESSAGE` the middle is left out.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def one_line(message: str) -> str:
    """A message with control characters as escapes, and without the middle if it is longer than `LONGEST_MESSAGE`."""
    printable = (char if char.isprintable() else char.encode("unicode_escape").decode() for char in _cut(message))
    return _cut("".join(printable))  # an escape is longer than its character


def _cut(message: str) -> str:
    if len(message) <= LONGEST_MESSAGE:
        return message
    return f"{message[: LONGEST_MESSAGE - 500]} ... {message[-400:]}"


def shown(value: object) -> str:
    """A value as Python writes it, shortened where it is long: what an error says was given.

    Example:
        >>> shown("fast"), len(shown("9" * 1_000_000))
        ("'fast'", 200)
    """
    return _shortened.repr(value)


class RunError(RuntimeError):
    """A run cannot continue: says why, and how to resume it. Examples are a full disk and a reward that keeps failing.

    The command line prints it as one line and exits with code 1, as with `UserError`.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class PolicyError(RuntimeError):
    """A clip policy broke its contract in a run: names the policy and what was wrong.

    The command line prints it as one line and exits with code 1, as with `UserError`.
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
        prefix: place of the settings in the run's configuration, such as ``"clip."``.
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
    return f"{key}={shown(first['input'])}: {message[:1].lower()}{message[1:]}"


def first_mistake(error: ValidationError) -> str:
    """The first mistake of a pydantic error in what a program wrote: where, and what it should be.

    Example:
        ``"step: input should be a valid integer"``
    """
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    message = str(first["msg"])
    return f"{where}: {message[:1].lower()}{message[1:]}".lstrip(": ")


def _section(model: type[BaseModel], location: list[str]) -> type[BaseModel] | None:
    section: type[BaseModel] | None = model
    for part in location:
        field = section.model_fields.get(part) if section else None
        inner: Any = field.annotation if field else None
        section = inner if hasattr(inner, "model_fields") else None
    return section
