"""`rlzoo clips`, `advantages` and `corrections`: list, show, check and create what plugins provide."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.padding import Padding
from rich.text import Text

from rlzoo.cli import complete
from rlzoo.cli.check import check_parts, check_rules
from rlzoo.cli.command import Command, Group
from rlzoo.cli.console import Plain
from rlzoo.cli.exits import FAILED
from rlzoo.cli.fields import print_settings, settings
from rlzoo.cli.kinds import ADVANTAGES, CLIPS, CORRECTIONS, Kind
from rlzoo.cli.new import write
from rlzoo.cli.options import AsJson, Plugins
from rlzoo.cli.portrait import clips_portrait

if TYPE_CHECKING:
    from rlzoo.core.policy import ClipPolicy
    from rlzoo.core.zoo import Entry, Shelf


def _summary(shelf: Shelf[Any], entry: Entry[Any]) -> dict[str, Any]:
    kind, defaults = entry.kind, dict[str, Any]()
    if hasattr(kind, "scope"):
        from rlzoo.core.policy import NAMED

        defaults = {"scope": kind.scope}
        defaults |= {name: kind.model_fields[name].get_default(call_default_factory=True) for name in NAMED}
    aliases = [alias for alias, (name, _) in shelf.aliases.items() if name == kind.name]
    return {
        "name": kind.name,
        "what it does": (inspect.getdoc(kind) or "").partition("\n")[0],
        **defaults,
        **({"aliases": aliases} if aliases or not defaults else {}),
        "paper": kind.paper,
        "from": entry.source,
    }


def _list(kind: Kind, plugins: list[str] | None, as_json: bool) -> None:
    shelf = kind.shelf(plugins)
    rows = [_summary(shelf, entry) for entry in shelf.entries.values()]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    console = Plain()
    for row, entry in zip(rows, shelf.entries.values(), strict=True):
        more = f"  {row['scope']}, {row['advantage']}, {row['reduction']}" if "scope" in row else ""
        more += f"  also {', '.join(row['aliases'])}" if row.get("aliases") else ""
        source = "" if entry.plugin.bundled else f"  {row['from']}"
        console.print(Text.assemble((row["name"], "bold"), more, (f"  {row['paper']}{source}", "dim")))
        console.print(Padding(Text(row["what it does"]), (0, 0, 0, 6)))


def _show(kind: Kind, name: str, plugins: list[str] | None, as_json: bool) -> None:
    shelf, entries, is_path = kind.find(name, plugins)
    if as_json:
        found = [_as_dict(shelf, entry) for entry in entries]
        print(json.dumps(found if is_path else found[0], indent=2))
        return
    from rlzoo.core.policy import required_fields

    console = Plain()
    for part in (entry.kind for entry in entries):
        fields, is_rule = settings(part), kind is CLIPS
        console.print(Text.assemble((part.name, "bold"), f"  {shelf.entries[part.name].source}  {part.paper}\n"))
        console.print_docstring(inspect.getdoc(part) or "")
        option = "--set clip.NAME=VALUE" if is_rule else f"--set {kind.key}={part.name} --set {kind.key}.NAME=VALUE"
        if fields:
            print_settings(console, fields, option, required_fields(part) if is_rule else ())
        if is_rule and (changed := _in_the_default_run(part)):
            console.print(f"`rlzoo train --clip {part.name}` sets {changed}, which suits the small default model.")
        for title, notes in (("Watch these metrics", getattr(part, "watch", {})), ("Laws it opts out of", part.exempt)):
            if notes:
                console.print(f"\n{title}", style="bold")
            for key, text in notes.items():
                console.print(Padding(Text(f"{key}: {text}"), (0, 0, 0, 2)))


def _as_dict(shelf: Shelf[Any], entry: Entry[Any]) -> dict[str, Any]:
    kind = entry.kind
    watch = {"watch": dict(kind.watch)} if hasattr(kind, "watch") else {}
    more = {"doc": inspect.getdoc(kind), "settings": settings(kind), **watch, "opted out": dict(kind.exempt)}
    return _summary(shelf, entry) | more


def _in_the_default_run(policy: type[ClipPolicy]) -> str:
    """Return the settings for which the default run overrides the rule's class defaults, with their values."""
    from rlzoo.config.run_config import RunConfig
    from rlzoo.core.errors import UserError

    try:
        run = RunConfig.compose(clip=policy.name).clip
    except UserError:  # the rule is in a plugin file that is not installed
        return ""
    own = {name: field.get_default(call_default_factory=True) for name, field in policy.model_fields.items()}
    changed = {name: value for name, value in run.model_dump().items() if name in own and value != own[name]}
    return ", ".join(f"{name} {json.dumps(value)}" for name, value in changed.items())


def _check(kind: Kind, name: str, as_json: bool) -> None:
    shelf, entries, _ = kind.find(name, None)
    if kind is CLIPS:
        reports = check_rules([entry.kind for entry in entries], as_json=as_json)
    else:
        made = [entry.kind() for entry in entries] if name not in shelf.aliases else [shelf.build(kind.key, name)]
        reports = check_parts(kind.command, made, as_json=as_json)
    if as_json:
        print(json.dumps(reports, indent=2))
    if any(outcome["status"] == "fail" for report in reports for outcome in report["laws"]):
        raise typer.Exit(FAILED)


RuleOrPath = Annotated[
    str,
    typer.Argument(metavar="NAME|PATH", autocompletion=complete.policies, help="A rule's name, or a plugin file or folder."),
]
NameOrPath = Annotated[str, typer.Argument(metavar="NAME|PATH", help="Name, as printed by `list`, or a plugin file or folder.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the new plugin: lower-case words with hyphens.")]
Folder = Annotated[Path, typer.Option(help="Folder in which to create rlzoo-NAME.")]


def clips_list(plugin: Plugins = None, as_json: AsJson = False) -> None:
    """List the installed rules."""
    _list(CLIPS, plugin, as_json)


def clips_show(name: RuleOrPath, plugin: Plugins = None, as_json: AsJson = False) -> None:
    """Show a rule's formula, settings with bounds and defaults, metrics to watch, and reference."""
    _show(CLIPS, name, plugin, as_json)


def clips_check(name: RuleOrPath, as_json: AsJson = False) -> None:
    """Check a rule against the laws, and measure where it cuts off the gradient; exit with code 1 if it breaks a law."""
    _check(CLIPS, name, as_json)


def clips_new(name: Name, folder: Folder = Path()) -> None:
    """Write a starter distribution for a new rule: module, test, README and packaging."""
    write(CLIPS, name, folder)


def advantages_list(plugin: Plugins = None, as_json: AsJson = False) -> None:
    """List the installed advantage estimators."""
    _list(ADVANTAGES, plugin, as_json)


def advantages_show(name: NameOrPath, plugin: Plugins = None, as_json: AsJson = False) -> None:
    """Show an advantage estimator's formula, settings with bounds and defaults, and reference."""
    _show(ADVANTAGES, name, plugin, as_json)


def advantages_check(name: NameOrPath, as_json: AsJson = False) -> None:
    """Check an advantage estimator against the laws; exit with code 1 if it breaks one."""
    _check(ADVANTAGES, name, as_json)


def advantages_new(name: Name, folder: Folder = Path()) -> None:
    """Write a starter distribution for a new advantage estimator: module, test, README and packaging."""
    write(ADVANTAGES, name, folder)


def corrections_list(plugin: Plugins = None, as_json: AsJson = False) -> None:
    """List the installed mismatch corrections."""
    _list(CORRECTIONS, plugin, as_json)


def corrections_show(name: NameOrPath, plugin: Plugins = None, as_json: AsJson = False) -> None:
    """Show a mismatch correction's formula, settings with bounds and defaults, and reference."""
    _show(CORRECTIONS, name, plugin, as_json)


def corrections_check(name: NameOrPath, as_json: AsJson = False) -> None:
    """Check a mismatch correction against the laws; exit with code 1 if it breaks one."""
    _check(CORRECTIONS, name, as_json)


def corrections_new(name: Name, folder: Folder = Path()) -> None:
    """Write a starter distribution for a new correction: module, test, README and packaging."""
    write(CORRECTIONS, name, folder)


def _group(help_: str, *commands: Callable[..., None]) -> typer.Typer:
    app = typer.Typer(cls=Group, help=help_, no_args_is_help=True)
    for command in commands:
        app.command(command.__name__.partition("_")[2], cls=Command)(command)
    return app


GROUPS = {
    "clips": _group("The installed clipping rules.", clips_list, clips_show, clips_check, clips_portrait, clips_new),
    "advantages": _group(
        "The installed advantage estimators.", advantages_list, advantages_show, advantages_check, advantages_new
    ),
    "corrections": _group(
        "The installed corrections for differences between the sampler and the trainer.",
        corrections_list,
        corrections_show,
        corrections_check,
        corrections_new,
    ),
}
"""The three groups of commands by name."""
