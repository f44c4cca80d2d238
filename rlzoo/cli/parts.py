"""`rlzoo advantages` and `rlzoo corrections`: list, show and check what is installed."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.padding import Padding
from rich.text import Text

from rlzoo.cli.clips import print_settings, settings
from rlzoo.cli.command import Command, Group
from rlzoo.cli.console import Plain
from rlzoo.cli.exits import FAILED
from rlzoo.cli.new import advantages_new, corrections_new
from rlzoo.cli.options import AsJson, Plugins, loading
from rlzoo.cli.tables import table

if TYPE_CHECKING:
    from rlzoo.zoo import Entry, Shelf

NameOrPath = Annotated[str, typer.Argument(metavar="NAME|PATH", help="Name, as printed by `list`, or a plugin file or folder.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name, as printed by `list`.")]


def advantages_list(plugin: Plugins = None, as_json: AsJson = False) -> None:
    """List the installed advantage estimators."""
    _list(_shelf("advantages", plugin), as_json)


def advantages_show(name: Name, plugin: Plugins = None, as_json: AsJson = False) -> None:
    """Show an advantage estimator's formula, settings with bounds and defaults, and reference."""
    _show(_shelf("advantages", plugin), name, "clip.advantage", as_json)


def advantages_check(name: NameOrPath, as_json: AsJson = False) -> None:
    """Check an advantage estimator against the laws; exit with code 1 if it breaks one."""
    _check("advantages", name, as_json)


def corrections_list(plugin: Plugins = None, as_json: AsJson = False) -> None:
    """List the installed mismatch corrections."""
    _list(_shelf("corrections", plugin), as_json)


def corrections_show(name: Name, plugin: Plugins = None, as_json: AsJson = False) -> None:
    """Show a mismatch correction's formula, settings with bounds and defaults, and reference."""
    _show(_shelf("corrections", plugin), name, "correction", as_json)


def corrections_check(name: NameOrPath, as_json: AsJson = False) -> None:
    """Check a mismatch correction against the laws; exit with code 1 if it breaks one."""
    _check("corrections", name, as_json)


def _app(help_: str, **commands: Any) -> typer.Typer:
    app = typer.Typer(cls=Group, help=help_, no_args_is_help=True)
    for name, command in commands.items():
        app.command(name, cls=Command)(command)
    return app


advantages = _app(
    "The installed advantage estimators.",
    list=advantages_list,
    show=advantages_show,
    check=advantages_check,
    new=advantages_new,
)
corrections = _app(
    "The installed corrections for differences between the sampler and the trainer.",
    list=corrections_list,
    show=corrections_show,
    check=corrections_check,
    new=corrections_new,
)


def _shelf(kind: str, plugins: list[str] | None) -> Shelf[Any]:
    with loading():
        from rlzoo.zoo import load_zoo
    shelf: Shelf[Any] = getattr(load_zoo(plugins or []), kind)
    return shelf


def _summary(shelf: Shelf[Any], entry: Entry[Any]) -> dict[str, Any]:
    kind = entry.kind
    return {
        "name": kind.name,
        "what it does": (inspect.getdoc(kind) or "").partition("\n")[0],
        "aliases": [alias for alias, (name, _) in shelf.aliases.items() if name == kind.name],
        "paper": kind.paper,
        "from": entry.source,
    }


def _list(shelf: Shelf[Any], as_json: bool) -> None:
    rows = [_summary(shelf, entry) for entry in shelf.entries.values()]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    console = Plain()
    for row, entry in zip(rows, shelf.entries.values(), strict=True):
        also = f"  also {', '.join(row['aliases'])}" if row["aliases"] else ""
        source = "" if entry.plugin.bundled else f"  {row['from']}"
        console.print(Text.assemble((row["name"], "bold"), also, (f"  {row['paper']}{source}", "dim")))
        console.print(Padding(Text(row["what it does"]), (0, 0, 0, 6)))


def _show(shelf: Shelf[Any], name: str, key: str, as_json: bool) -> None:
    kind = shelf[shelf.aliases[name][0] if name in shelf.aliases else name]
    entry, fields = shelf.entries[kind.name], settings(kind)
    if as_json:
        more = {"doc": inspect.getdoc(kind), "settings": fields, "opted out": dict(kind.exempt)}
        print(json.dumps({**_summary(shelf, entry), **more}, indent=2))
        return
    console = Plain()
    console.print(Text.assemble((kind.name, "bold"), f"  {entry.source}  {kind.paper}\n"))
    console.print_docstring(inspect.getdoc(kind) or "")
    if fields:
        print_settings(console, fields, f"--set {key}={kind.name} --set {key}.NAME=VALUE", required=())
    for law, reason in kind.exempt.items():
        console.print(f"\nopts out of {law}: {reason}")


def _check(kind: str, name: str, as_json: bool) -> None:
    with loading():
        from rlzoo.testing import ADVANTAGE_LAWS, CORRECTION_LAWS
        from rlzoo.testing.parts import broken
    shelf = _shelf(kind, None)
    if name not in shelf and (name.endswith(".py") or Path(name).is_dir()):
        parts = [entry.kind() for entry in _shelf(kind, [name]).asked_for()]
    else:
        parts = [shelf.build(kind, name)]
    laws: Any = ADVANTAGE_LAWS if kind == "advantages" else CORRECTION_LAWS
    reports, console = [], Plain()
    for part in parts:
        found = dict(broken(laws, part))
        outcomes = [
            {
                "law": law.name,
                "status": "opted out" if law.name in part.exempt else "fail" if law.name in found else "pass",
                "detail": part.exempt.get(law.name, found.get(law.name, "")),
            }
            for law in laws
        ]
        reports.append({"name": part.name, "laws": outcomes})
        if as_json:
            continue
        rows = table("<law", "<", "<")
        for outcome in outcomes:
            rows.add_row(*map(Text, outcome.values()))
        console.print(Text.assemble((part.name, "bold"), f"  {part.paper}"))
        console.print(rows)
        opted_out = sum(outcome["status"] == "opted out" for outcome in outcomes)
        console.print(f"{len(laws) - len(found) - opted_out} kept, {len(found)} broken, {opted_out} opted out\n")
    if as_json:
        print(json.dumps(reports, indent=2))
    if any(outcome["status"] == "fail" for report in reports for outcome in report["laws"]):
        raise typer.Exit(FAILED)
