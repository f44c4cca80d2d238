"""Parses untrusted YAML and JSON, rejecting bad input with a one-line reason, and writes YAML that any reader understands."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from rlzoo.core.errors import shown

LONGEST_YAML = 20_000  # maximum number of characters, which PyYAML parses in about 0.3 s; configs are ten times shorter
DEEPEST = 40  # maximum nesting depth of lists and mappings, because code that traverses settings recurses
LARGEST = 100_000  # maximum number of values in a YAML text; aliases can multiply values
MOST_BITS = 14_000  # maximum number of bits in an integer, because Python prints at most 4300 digits
TOO_DEEP = f"lists or mappings nested deeper than {DEEPEST}"


class UnreadableError(ValueError):
    """Raised if a text is not valid YAML or JSON or exceeds a limit. The message quotes at most one key of the text."""


TAG = "tag:yaml.org,2002:"
PLAIN = {
    "bool": ("tTfF", r"true|True|TRUE|false|False|FALSE"),
    "int": ("-+0123456789", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"),
    "float": ("-+.0123456789", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
}
"""First characters and regex of unquoted booleans and numbers in YAML 1.2's core schema."""


class _Loader(yaml.SafeLoader):
    """Reads YAML 1.2, in which ``1e-3`` is a number and ``on`` is a string, and rejects repeated keys in a mapping."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        lines: dict[Any, int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):  # before merges, which may be overridden
            name = key.value if key.tag == f"{TAG}merge" else self.construct_object(key)
            if first := lines.get(name):
                problem = f"repeats the key {shown(name)} of line {first}; combine the two, or remove one"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            lines[name] = key.start_mark.line + 1
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes each string that YAML 1.1 or 1.2 would read as another type."""


_BASES = {"0x": 16, "0o": 8}  # unlike in YAML 1.1, 010 is ten
_Loader.add_constructor(f"{TAG}int", lambda _, node: int(node.value, _BASES.get(node.value[:2], 10)))
_Loader.yaml_implicit_resolvers = {
    first: [(tag, regex) for tag, regex in known if tag in (f"{TAG}null", f"{TAG}merge")]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, (_first, _regex) in PLAIN.items():
    for _kind in (_Loader, _Dumper):
        _kind.add_implicit_resolver(TAG + _tag, re.compile(f"^({_regex})$"), [*_first])
_Dumper.add_implicit_resolver(f"{TAG}bool", re.compile("^[yYnN]$"), [*"yYnN"])  # booleans of YAML 1.1 that PyYAML omits


def dump_yaml(value: Any) -> str:
    """Format a value as YAML that readers of YAML 1.1 and 1.2 read as the same value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False)


def parse_yaml(text: str) -> Any:
    """Parse a YAML text with the types of YAML 1.2's core schema.

    Raises:
        UnreadableError: the text is invalid, too long, too deeply nested or too large, or a mapping contains a key twice.
    """
    if len(text) > LONGEST_YAML:
        raise UnreadableError(f"{len(text):,} characters are too many (at most {LONGEST_YAML:,})")
    try:
        value = _Loader(text).get_single_data()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1} " if mark else ""
        raise UnreadableError(f"{where}{getattr(error, 'problem', None) or error}") from error
    except RecursionError:
        raise UnreadableError(TOO_DEEP) from None
    # PyYAML does not catch Python's errors for invalid dates, numbers and tagged scalars
    except (ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:
        raise UnreadableError(f"a value does not match its type: {error}") from error
    return _checked(value, LARGEST)


def parse_json(text: str, parse_float: Callable[[str], Any] = float) -> Any:
    """Parse a JSON text, including Python's NaN and Infinity. ``parse_float`` works as in `json.loads`.

    Raises:
        UnreadableError: the text is invalid or too deeply nested, or an object has the same key twice.
    """
    try:
        value = json.loads(text, parse_float=parse_float, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        line = f" of line {error.lineno}" if error.lineno > 1 else ""
        raise UnreadableError(f"{error.msg} at column {error.colno}{line}") from error
    except RecursionError:
        raise UnreadableError(TOO_DEEP) from None
    except UnreadableError:
        raise
    except ValueError as error:  # a number may have more digits than Python can parse
        raise UnreadableError(str(error).partition(";")[0]) from error
    return _checked(value, sys.maxsize)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the value of an object; raise `UnreadableError` for a repeated key, for which `json` would keep the last value."""
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise UnreadableError(f"the key {shown(key)} occurs twice in one object")
        value[key] = item
    return value


def _checked(value: Any, largest: int) -> Any:
    """Return the value, or raise an error if it is too large to traverse or cannot be written."""
    waiting, number = [(value, 0)], 0
    while waiting:
        item, depth = waiting.pop()
        number += 1
        if number > largest:
            raise UnreadableError(f"more than {largest:,} values")
        if isinstance(item, int) and item.bit_length() > MOST_BITS:
            raise UnreadableError("a number with thousands of digits")
        if isinstance(item, str) and not item.isascii() and any("\ud800" <= char <= "\udfff" for char in item):
            raise UnreadableError("half of a surrogate pair, such as \\ud800, which is not valid text")
        if isinstance(item, Mapping | list | tuple | set):
            if depth == DEEPEST:  # this also catches values that contain themselves
                raise UnreadableError(TOO_DEEP)
            inner = [*item.keys(), *item.values()] if isinstance(item, Mapping) else item
            waiting += [(element, depth + 1) for element in inner]
    return value
