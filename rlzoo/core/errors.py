"""Exceptions with one-line messages, grouped by who can fix the cause, and functions to format pydantic errors as one line."""

from __future__ import annotations

import difflib
import reprlib
import traceback
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError


LONGEST_MESSAGE = 2000  # number of characters, about one screen
_LONGEST_VALUE = 200

_shortened = reprlib.Repr()
_shortened.maxlevel, _shortened.maxstring, _shortened.maxother = 6, _LONGEST_VALUE, _LONGEST_VALUE
_shortened.repr_Decimal = lambda number, level: str(number)  # type: ignore[attr-defined]  # written as in the user's file
_shortened.maxdict = _shortened.maxlist = _shortened.maxtuple = _shortened.maxset = _shortened.maxlong = 40


class UserError(ValueError):
    """Raised for a mistake in the user's input. The message says what was given, what is allowed and what to do.

    The command line prints the message and exits with code 2. The message is always a single line: control characters are
    escaped, and the middle of a message longer than `LONGEST_MESSAGE` is left out.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def one_line(message: str) -> str:
    """Escape control characters in a message, and leave out the middle of a message longer than `LONGEST_MESSAGE`."""
    line = printable(message)
    return line if len(line) <= LONGEST_MESSAGE else f"{line[: LONGEST_MESSAGE - 500]} ... {line[-400:]}"


def printable(text: str, keep: str = "") -> str:
    r"""Escape control characters so that untrusted text cannot move the cursor, hide other text or reverse it.

    Example:
        >>> print(printable("a\x1b[2Jb"))
        a\x1b[2Jb
    """
    return "".join(char if char.isprintable() or char in keep else char.encode("unicode_escape").decode() for char in text)


def shown(value: object) -> str:
    """Format a value for an error message: its ``repr``, shortened if it is long.

    Example:
        >>> shown("fast"), len(shown("9" * 1_000_000))
        ("'fast'", 200)
    """
    return _shortened.repr(value)


def described(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def located(error: Exception) -> str:
    """Format an exception as one line with its last file and line number outside libraries, if there is any."""
    frames, ours = traceback.extract_tb(error.__traceback__), __file__.removesuffix("core/errors.py")
    last = ([one for one in frames if not one.filename.startswith(ours) and "site-packages" not in one.filename] or frames)[-1]
    return f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})".replace("\n", " ")


class RunError(RuntimeError):
    """Raised when a run cannot continue, for example because the disk is full. The message says why, and how to resume.

    The command line prints the message as one line, as for `UserError`, and exits with code 1.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class PolicyError(RuntimeError):
    """Raised when a clip policy breaks its contract during a run. The message names the policy and the problem.

    The command line prints the message as one line, as for `UserError`, and exits with code 1.
    """

    def __init__(self, policy: str, problem: str) -> None:
        super().__init__(f"rule {policy!r} {problem}")


def did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Return ``"; did you mean 'lr'?"`` with the prefix and the closest known word, or an empty string if no word is close."""
    names = {name.lower(): name for name in known}
    begun = [name for name in names if word and name.startswith(word.lower())]
    close = begun or difflib.get_close_matches(word.lower(), list(names), n=1)
    return f"; did you mean {prefix + names[close[0]]!r}?" if close else ""


def explain(error: ValidationError, model: type[BaseModel], prefix: str = "") -> str:
    """Format the first mistake in a pydantic error as one line: the key, what was given and what is allowed.

    Args:
        error: an error raised by ``model``.
        model: the settings class, which defines the allowed keys.
        prefix: path of the settings in the run's configuration, such as ``"clip."``.
    """
    first = error.errors()[0]
    location = [str(key) for key in first["loc"]]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, UserError):
        return str(cause)
    key = prefix + ".".join(location)
    if first["type"] == "extra_forbidden":
        section = _section(model, location[:-1])
        allowed = list(section.model_fields) if section else []
        elsewhere = [] if prefix else keys_called(location[-1], model)
        dotted = "" if "/" in prefix else key.removesuffix(location[-1])  # --set needs the whole key; rule/key:value does not
        hint = f"; did you mean {elsewhere[0]!r}?" if elsewhere else did_you_mean(location[-1], allowed, dotted)
        listed = f" (allowed: {', '.join(allowed)})"
        return f"unknown key {key!r}{hint or listed}"
    message = str(cause or first["msg"])
    if not location:
        return f"{prefix.rstrip('.')}: {message}".lstrip(": ")
    if first["type"] == "missing":
        return f"{key} is missing"
    return f"{key}={shown(first['input'])}: {message[:1].lower()}{message[1:]}"


def first_mistake(error: ValidationError | OSError) -> str:
    """Format why a program's data cannot be read: the system's reason, or the first wrong value and what is expected there."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    first = error.errors()[0]
    where = ".".join(str(key) for key in first["loc"])
    message = str(first["msg"])
    return f"{where}: {message[:1].lower()}{message[1:]}".lstrip(": ")


OTHER_NAMES = {
    "batch_size": "num_prompts",
    "beta": "kl_coef",
    "epochs": "num_epochs",
    "learning_rate": "lr",
    "max_completion_length": "max_new_tokens",
    "max_length": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "mini_batches": "num_minibatches",
    "model": "path",
    "n": "group_size",
    "num_generations": "group_size",
    "ppo_epochs": "num_epochs",
}
"""Maps names of settings in other libraries to the corresponding keys in rlzoo."""


def keys_called(name: str, model: type[BaseModel], prefix: str = "") -> list[str]:
    """Return the dotted keys of the settings that have this name in rlzoo or in another library."""
    wanted = {name, OTHER_NAMES.get(name, name)}
    keys: list[str] = []
    for key, field in model.model_fields.items():
        inner: Any = field.annotation
        if hasattr(inner, "model_fields"):
            keys += keys_called(name, inner, f"{prefix}{key}.")
        elif key in wanted and prefix:
            keys.append(f"{prefix}{key}")
    return keys


def _section(model: type[BaseModel], location: list[str]) -> type[BaseModel] | None:
    section: type[BaseModel] | None = model
    for key in location:
        field = section.model_fields.get(key) if section else None
        inner: Any = field.annotation if field else None
        section = inner if hasattr(inner, "model_fields") else None
    return section
