"""The settings of a rule, an estimator or a correction, as a table."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rich.text import Text

from rlzoo.cli.console import Plain
from rlzoo.cli.tables import table

if TYPE_CHECKING:
    from pydantic import BaseModel


def print_settings(console: Plain, fields: list[dict[str, Any]], option: str) -> None:
    """Print a table of the fields that `settings` returns."""
    rows = table("<name", "<default", "<allowed", "<meaning", title=f"\nSettings ({option})")
    rows.columns[2].overflow = "fold"  # an option's name may be wider than its column
    for field in fields:
        cells = (field["name"], json.dumps(field["default"]), field["allowed"], field["description"])
        rows.add_row(*map(Text, cells))  # `Text`, so that brackets are not read as markup
    console.print(rows)


def settings(kind: type[BaseModel]) -> list[dict[str, Any]]:
    """Return the fields of a rule, estimator or correction: name, default, allowed values and description."""
    required = [name for name, field in kind.model_fields.items() if field.is_required()]
    defaults = {name: field.get_default() for name, field in kind.model_fields.items()} if required else kind().model_dump()
    properties = kind.model_json_schema()["properties"]
    return [
        {
            "name": name,
            "default": None if name in required else defaults[name],
            "allowed": "an estimator's name" if name == "advantage" and "enum" not in schema else _allowed(schema),
            "description": schema.get("description", ""),
        }
        for name, schema in properties.items()
    ]


def _allowed(schema: dict[str, Any]) -> str:
    options = schema.get("anyOf", [schema])
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    words = []
    for option in options:
        if option.get("type") == "array":
            words.append(f"list, each {_allowed(option.get('items', {}))}")
            continue
        if option.get("type") == "object":
            continue  # skip an object with a name and settings, because the name alone is also allowed
        bounds = [f"{sign} {option[key]:g}" for key, sign in signs.items() if key in option]
        words.append(", ".join(option.get("enum", bounds)) or option.get("type", ""))
    return " or ".join(words)
