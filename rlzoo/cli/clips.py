"""`rlzoo clips list` and `rlzoo clips show`: the installed rules."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.padding import Padding
from rich.text import Text

from rlzoo.cli import complete
from rlzoo.cli.console import Plain
from rlzoo.cli.options import AsJson, Plugins, check_rule_names, loading, refuse_config
from rlzoo.cli.tables import table

if TYPE_CHECKING:
    from collections.abc import Collection

    from pydantic import BaseModel

    from rlzoo.policy import ClipPolicy
    from rlzoo.zoo import Entry


def clips_list(plugin: Plugins = None, as_json: AsJson = False) -> None:
    """List the installed rules."""
    with loading():
        from rlzoo.zoo import load_zoo
    entries = load_zoo(plugin or []).entries.values()
    rows = [_summary(entry) for entry in entries]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    console = Plain()
    for row, entry in zip(rows, entries, strict=True):
        defaults = f"{row['scope']}, {row['advantage']}, {row['reduction']}"
        source = "" if entry.plugin.bundled else f"  {row['from']}"
        console.print(Text.assemble((row["name"], "bold"), f"  {defaults}  ", (f"{row['paper']}{source}", "dim")))
        console.print(Padding(Text(row["what it does"]), (0, 0, 0, 6)))


def clips_show(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|PATH", autocompletion=complete.policies, help="A rule's name, or a plugin file or folder."
        ),
    ],
    plugin: Plugins = None,
    as_json: AsJson = False,
) -> None:
    """Show a rule's formula, settings with bounds and defaults, metrics to watch, and reference."""
    with loading():
        from rlzoo.zoo import is_path, load_zoo
    zoo = load_zoo(plugin or [])
    check_rule_names([name])
    is_misspelled = name not in zoo and name.lower() in zoo and not Path(name).exists()  # only in capital letters
    if is_misspelled or not is_path(name, zoo):
        if name not in zoo:
            refuse_config(name)
        policy = zoo[name]  # raises an error that says why a rule cannot be used
        entries = [zoo.entries[policy.name]]
    else:
        entries = load_zoo([name]).asked_for()
    if as_json:
        found = [_as_dict(entry) for entry in entries]
        print(json.dumps(found if is_path(name, zoo) else found[0], indent=2))
        return
    console = Plain()
    for entry in entries:
        _show(console, entry)


def _as_dict(entry: Entry[Any]) -> dict[str, Any]:
    policy = entry.kind
    more = {
        "doc": inspect.getdoc(policy),
        "settings": settings(policy),
        "watch": dict(policy.watch),
        "opted out": dict(policy.exempt),
    }
    return {**_summary(entry), **more}


def _show(console: Plain, entry: Entry[Any]) -> None:
    from rlzoo.policy import required_fields

    policy, fields = entry.kind, settings(entry.kind)
    console.print(Text.assemble((policy.name, "bold"), f"  {entry.source}  {policy.paper}\n"))
    console.print_docstring(inspect.getdoc(policy) or "")
    print_settings(console, fields, "--set clip.NAME=VALUE", required_fields(policy))
    if changed := _in_the_default_run(policy):
        console.print(f"`rlzoo train --clip {policy.name}` sets {changed}, which suits the small default model.")
    for title, notes in (("Watch these metrics", policy.watch), ("Laws it opts out of", policy.exempt)):
        if notes:
            console.print(f"\n{title}", style="bold")
        for key, text in notes.items():
            console.print(Padding(Text(f"{key}: {text}"), (0, 0, 0, 2)))


def _in_the_default_run(policy: type[ClipPolicy]) -> str:
    """Return the settings for which the default run overrides the rule's class defaults, with their values."""
    from rlzoo.config.run_config import RunConfig
    from rlzoo.errors import UserError

    try:
        run = RunConfig.compose(clip=policy.name).clip
    except UserError:  # the rule is in a plugin file that is not installed
        return ""
    own = {name: field.get_default(call_default_factory=True) for name, field in policy.model_fields.items()}
    changed = {name: value for name, value in run.model_dump().items() if name in own and value != own[name]}
    return ", ".join(f"{name} {json.dumps(value)}" for name, value in changed.items())


def print_settings(console: Plain, fields: list[dict[str, Any]], option: str, required: Collection[str]) -> None:
    """Print a table of the fields that `settings` returns."""
    rows = table("<name", "<default", "<allowed", "<meaning", title=f"\nSettings ({option})")
    cells = []
    for field in fields:
        default = "required" if field["name"] in required else json.dumps(field["default"])
        cells.append((field["name"], default, field["allowed"], field["description"]))
        rows.add_row(*map(Text, cells[-1]))  # brackets in a description are not markup
    if sum(max(map(len, column)) + 2 for column in zip(*cells, strict=True)) > console.width:
        # as wide as the longest word; with only a minimum width, rich makes the table too wide and cuts off the last column
        rows.columns[2].width = max(len(word) for _, _, allowed, _ in cells for word in allowed.split() or [""])
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


def _summary(entry: Entry[ClipPolicy]) -> dict[str, str]:
    from rlzoo.policy import NAMED

    policy = entry.kind
    defaults = {name: policy.model_fields[name].get_default(call_default_factory=True) for name in NAMED}
    return {
        "name": policy.name,
        "what it does": (inspect.getdoc(policy) or "").partition("\n")[0],
        "scope": policy.scope,
        "advantage": defaults["advantage"],
        "reduction": defaults["reduction"],
        "paper": policy.paper,
        "from": entry.source,
    }
