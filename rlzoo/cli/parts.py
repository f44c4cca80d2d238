"""`rlzoo clips`, `advantages` and `corrections`: list, show, check and create the parts that plugins provide."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.padding import Padding
from rich.text import Text

from rlzoo.cli.check import check
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
    columns: dict[str, Any] = {name: name for name in ("name", "scope", "advantage", "reduction", "paper") if name in rows[0]}
    columns["name"] = kind.what.rpartition(" ")[2]
    widths = {name: min(16, max(len(str(row[name])) for row in [*rows, columns])) for name in columns} | {"paper": 0}
    console = Plain()
    console.print("  ".join(f"{head:<{widths[name]}}" for name, head in columns.items()).rstrip(), style="bold")
    for row, entry in zip(rows, shelf.entries.values(), strict=True):
        more = f"  also {', '.join(row['aliases'])}" if row.get("aliases") else ""
        more += "" if entry.plugin.bundled else f"  {row['from']}"
        name, *others = (f"{row[name]!s:<{width}}" for name, width in widths.items())
        console.print(Text.assemble((name, "bold"), *(f"  {cell}" for cell in others), (more, "dim")))
        console.print(Padding(Text(row["what it does"]), (0, 0, 0, 6), expand=False))


def _show(kind: Kind, name: str, plugins: list[str] | None, as_json: bool) -> None:
    shelf, entries, is_path = kind.find(name, plugins)
    if as_json:
        described = [_as_dict(shelf, entry) for entry in entries]
        print(json.dumps(described if is_path else described[0], indent=2))
        return
    console = Plain()
    for entry in entries:
        plugin, is_rule = entry.kind, kind is CLIPS
        console.print(Text.assemble((plugin.name, "bold"), f"  {entry.source}  {plugin.paper}\n"))
        console.print(inspect.getdoc(plugin) or "", soft_wrap=not console.is_screen)  # on a screen, rich folds between words
        option = "--set clip.NAME=VALUE" if is_rule else f"--set {kind.key}={plugin.name} --set {kind.key}.NAME=VALUE"
        if fields := settings(plugin):
            print_settings(console, fields, option)
        if is_rule and entry.plugin.bundled and (changed := _in_the_default_run(plugin)):
            console.print(f"`rlzoo train --clip {plugin.name}` sets {changed}, which suits the small default model.")
        if is_rule and (lines := _in_races(plugin.name)):
            console.print("\nResults of `rlzoo race`", style="bold")
            for line in lines:
                console.print(Padding(Text(line), (0, 0, 0, 2), expand=False))
        for title, notes in (("Watch these metrics", getattr(plugin, "watch", {})), ("Laws it opts out of", plugin.exempt)):
            if notes:
                console.print(f"\n{title}", style="bold")
            for key, text in notes.items():
                console.print(Padding(Text(f"{key}: {text}"), (0, 0, 0, 2), expand=False))


def _as_dict(shelf: Shelf[Any], entry: Entry[Any]) -> dict[str, Any]:
    kind = entry.kind
    watch = {"watch": dict(kind.watch)} if hasattr(kind, "watch") else {}
    more = {"doc": inspect.getdoc(kind), "settings": settings(kind), **watch, "opted out": dict(kind.exempt)}
    return _summary(shelf, entry) | more


def _in_the_default_run(policy: type[ClipPolicy]) -> str:
    """Return the settings, with their values, in which the default run differs from a bundled rule's class defaults."""
    from rlzoo.config.run_config import RunConfig

    defaults = policy().model_dump()
    run = RunConfig.compose(clip=policy.name).clip.model_dump()
    return ", ".join(f"{name} {json.dumps(run[name])}" for name in defaults if run[name] != defaults[name])


def _in_races(rule: str) -> list[str]:
    """Return one line about the rule's result on each track, omitting tracks without a shipped result."""
    from rlzoo.lab.results import SHIPPED, Standings
    from rlzoo.lab.track import Track, track_names

    return [line for track in track_names() if (line := Standings.of(Track.read(track), SHIPPED).line(rule))]


def _check(kind: Kind, name: str, as_json: bool) -> None:
    shelf, entries, _ = kind.find(name, None)
    plugins = [shelf.build(kind.key, name)] if name in shelf.aliases else [entry.kind() for entry in entries]
    reports = check(kind, plugins, as_json=as_json)
    if as_json:
        print(json.dumps(reports, indent=2))
    if any(outcome["status"] == "fail" for report in reports for outcome in report["laws"]):
        raise typer.Exit(FAILED)


NameOrPath = Annotated[str, typer.Argument(metavar="NAME|PATH", help="Name, as printed by `list`, or a plugin file or folder.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the new plugin: lower-case words with hyphens.")]
Folder = Annotated[Path, typer.Option(help="Folder in which to create rlzoo-NAME.")]


def _group(kind: Kind) -> typer.Typer:
    noun = kind.what.partition(" ")[2]
    group = typer.Typer(help=f"The installed {noun}s.", no_args_is_help=True)

    @group.command("list", help=f"List the installed {noun}s.")
    def list_(plugin: Plugins = None, as_json: AsJson = False) -> None:
        _list(kind, plugin, as_json)

    @group.command(help=f"Show {kind.what}'s formula, settings and reference.")
    def show(name: NameOrPath, plugin: Plugins = None, as_json: AsJson = False) -> None:
        _show(kind, name, plugin, as_json)

    @group.command("check", help=f"Check {kind.what} against the laws. The exit code is 1 if it breaks one.")
    def check_(name: NameOrPath, as_json: AsJson = False) -> None:
        _check(kind, name, as_json)

    @group.command(help=f"Write a starter distribution for a new {noun}: module, test, README and packaging.")
    def new(name: Name, folder: Folder = Path()) -> None:
        write(kind, name, folder)

    return group


GROUPS = {kind.command: _group(kind) for kind in (CLIPS, ADVANTAGES, CORRECTIONS)}
"""The three groups of commands by name."""
GROUPS["clips"].command("portrait")(clips_portrait)
