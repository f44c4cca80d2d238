"""YAML and JSON that others wrote: read, or refused with one clear reason; never a surprise later."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import date
from typing import Any

import yaml

LONGEST_YAML = 20_000  # characters; PyYAML takes a third of a second for as many, and a config is ten times shorter
DEEPEST = 40  # nested lists and mappings; whatever walks over settings recurses
LARGEST = 1_000_000  # values, each counted as often as it stands in the whole: YAML's aliases make many of few
MOST_BITS = 14_000  # of a whole number: Python writes no number of more than 4300 digits


class UnreadableError(ValueError):
    """Text that is no YAML or JSON, or too much of it; the message is the reason, without what was read."""


def parse_yaml(text: str) -> Any:
    """The value that a YAML text stands for.

    Raises:
        UnreadableError: it is not valid, or too long, too deep or too large.
    """
    if len(text) > LONGEST_YAML:
        raise UnreadableError(f"{len(text):,} characters are too many (at most {LONGEST_YAML:,})")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1} " if mark else ""
        raise UnreadableError(f"{where}{getattr(error, 'problem', None) or error}") from error
    except RecursionError:
        raise _too_deep() from None
    # of scalars that look like a date or a number, or are said to be one: PyYAML lets through what Python says of them
    except (ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:
        raise UnreadableError(f"a value that is not what it is written as: {error}") from error
    _check(value)
    return value


def parse_json(text: str) -> Any:
    """The value that a JSON text stands for; NaN and Infinity are read as Python writes them.

    Raises:
        UnreadableError: it is not valid, or too deep or too large.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        line = f" of line {error.lineno}" if error.lineno > 1 else ""
        raise UnreadableError(f"{error.msg} at column {error.colno}{line}") from error
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # a number with more digits than Python reads
        raise UnreadableError(str(error).partition(";")[0]) from error
    _check(value)
    return value


def _check(value: Any) -> None:
    """Refuse what would hang, crash or not be writable later."""
    sizes: dict[int, int] = {}  # by identity, so that a value with many aliases is walked over once
    try:
        size = _size(value, sizes, 0)
    except UnicodeEncodeError:
        raise UnreadableError("half of a surrogate pair, such as \\ud800, which is no text") from None
    if size > LARGEST:
        raise UnreadableError(f"more than {LARGEST:,} values")


def _size(value: Any, sizes: dict[int, int], depth: int) -> int:
    """How many values a tree holds."""
    if isinstance(value, str):
        if not value.isascii():
            value.encode()
        return 1
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise UnreadableError("a number with thousands of digits")
    if not isinstance(value, Mapping | list | tuple | set):
        assert value is None or isinstance(value, int | float | bytes | date), type(value)
        return 1
    if depth == DEEPEST:  # also where a value holds itself
        raise _too_deep()
    if id(value) not in sizes:
        parts = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
        sizes[id(value)] = 1 + sum(_size(part, sizes, depth + 1) for part in parts)
    return sizes[id(value)]


def _too_deep() -> UnreadableError:
    return UnreadableError(f"lists or mappings nested deeper than {DEEPEST}")
