"""Shell completion of option values. `rlzoo --install-completion` sets it up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args, get_origin

import typer


def policies(incomplete: str) -> list[str]:
    """Return the names of rules that complete the last name in a comma-separated list."""
    from rlzoo.zoo import load_zoo

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in load_zoo() if name.startswith(last)]


def configs(incomplete: str) -> list[str]:
    """Return the names of shipped configs that complete a name."""
    from rlzoo.config.composition import config_names

    return [name for name in config_names() if name.startswith(incomplete)]


def settings(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return ``KEY=`` for matching settings or, after ``=``, ``KEY=VALUE`` for each value of a setting with fixed values.

    The settings of the rules that ``--clip`` names are included.
    """
    from rlzoo.config.run_config import RunConfig

    key, equals, _ = incomplete.partition("=")
    found = dict(_keys(RunConfig.model_fields, ""))
    if named := ctx.params.get("clip"):
        from rlzoo.zoo import load_zoo

        zoo = load_zoo()
        for policy in (zoo[name] for name in named.split(",") if name in zoo):
            found |= dict(_keys(policy.model_fields, "clip."))
    offered = [f"{key}={value}" for value in found.get(key, ())] if equals else [f"{name}=" for name in found]
    return [word for word in offered if word.startswith(incomplete)]


def _keys(fields: dict[str, Any], prefix: str) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield each dotted key with its fixed set of values, which is empty if any value is allowed."""
    for name, field in fields.items():
        if hasattr(field.annotation, "model_fields"):
            yield from _keys(field.annotation.model_fields, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _values(field.annotation)


def _values(annotation: Any) -> list[str]:
    """Return the possible values of a bool or a Literal, which may be part of a union."""
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    if annotation is bool:
        return ["true", "false"]
    return [value for inner in get_args(annotation) for value in _values(inner)]
