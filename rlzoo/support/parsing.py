"""Parses YAML and JSON that others wrote, or refuses it with one clear reason."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import yaml

LONGEST_YAML = 20_000  # characters; PyYAML takes a third of a second for as many, and a config is ten times shorter
DEEPEST = 40  # nested lists and mappings; code that walks over settings recurses
LARGEST = 100_000  # values of a YAML text, where aliases make many of few
MOST_BITS = 14_000  # of an integer: Python prints no more than 4300 digits
TOO_DEEP = f"lists or mappings nested deeper than {DEEPEST}"


class UnreadableError(ValueError):
    """The text is no YAML or JSON, or too much of it; the message is the reason and does not repeat the text."""


def parse_yaml(text: str) -> Any:
    """Parse a YAML text.

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
        raise UnreadableError(TOO_DEEP) from None
    # PyYAML passes on what Python raises for a scalar that looks like a date or a number, or is tagged as one
    except (ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:
        raise UnreadableError(f"a value that is not what it is written as: {error}") from error
    return _checked(value, LARGEST)


def parse_json(text: str) -> Any:
    """Parse a JSON text; NaN and Infinity are read as Python writes them.

    Raises:
        UnreadableError: it is not valid, or too deep.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        line = f" of line {error.lineno}" if error.lineno > 1 else ""
        raise UnreadableError(f"{error.msg} at column {error.colno}{line}") from error
    except RecursionError:
        raise UnreadableError(TOO_DEEP) from None
    except ValueError as error:  # a number with more digits than Python reads
        raise UnreadableError(str(error).partition(";")[0]) from error
    return _checked(value, sys.maxsize)


def _checked(value: Any, largest: int) -> Any:
    """Return the value, or refuse what would take too long to walk over or cannot be written."""
    waiting, number = [(value, 0)], 0
    while waiting:
        part, depth = waiting.pop()
        number += 1
        if number > largest:
            raise UnreadableError(f"more than {largest:,} values")
        if isinstance(part, int) and part.bit_length() > MOST_BITS:
            raise UnreadableError("a number with thousands of digits")
        if isinstance(part, str) and not part.isascii() and any("\ud800" <= char <= "\udfff" for char in part):
            raise UnreadableError("half of a surrogate pair, such as \\ud800, which is no text")
        if isinstance(part, Mapping | list | tuple | set):
            if depth == DEEPEST:  # also where a value contains itself
                raise UnreadableError(TOO_DEEP)
            inner = [*part.keys(), *part.values()] if isinstance(part, Mapping) else part
            waiting += [(each, depth + 1) for each in inner]
    return value
