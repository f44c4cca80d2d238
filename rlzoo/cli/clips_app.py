"""The commands under `rlzoo clips`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlzoo.cli.options import AsJson, Plugins, loading

clips = typer.Typer(help="The clip policies that are installed.", no_args_is_help=True)


@clips.command("list")
def clips_list(plugin: Plugins = None, as_json: AsJson = False) -> None:
    """List the installed clip policies."""
    with loading():
        from rlzoo.cli.clips import list_policies

    list_policies(plugin or [], as_json)


@clips.command("show")
def clips_show(
    name: Annotated[str, typer.Argument(help="A policy's name.")], plugin: Plugins = None, as_json: AsJson = False
) -> None:
    """Show a policy: its formula, settings with bounds and defaults, metrics to watch, reference."""
    with loading():
        from rlzoo.cli.clips import show_policy

    show_policy(name, plugin or [], as_json)


@clips.command("check")
def clips_check(
    name: Annotated[str, typer.Argument(metavar="NAME|PATH", help="A policy's name, or a plugin file or folder.")],
    as_json: AsJson = False,
) -> None:
    """Hold a policy to the laws every rule keeps; exit code 1 if it breaks one."""
    with loading():
        from rlzoo.cli.check import check_policies

    if not check_policies(name, as_json):
        raise typer.Exit(1)


@clips.command("new")
def clips_new(
    name: Annotated[str, typer.Argument(help="Name of the new policy: lower-case words with hyphens.")],
    folder: Annotated[Path, typer.Option(help="Folder to put rlzoo-NAME in.")] = Path(),
) -> None:
    """Write a distribution with a new policy: module, test, page and packaging, ready to change."""
    with loading():
        from rlzoo.cli.new import write_distribution

    write_distribution(name, folder)
