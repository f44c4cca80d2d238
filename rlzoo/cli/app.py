"""The commands and their options; whatever is slow to import is imported inside the command that needs it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="rlzoo",
    help="Train language models with any clipping rule of the zoo, and compare the rules.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
clips = typer.Typer(help="The clip policies that are installed.", no_args_is_help=True)
app.add_typer(clips, name="clips")

Plugins = Annotated[
    list[str] | None, typer.Option("--plugin", metavar="PATH", help="Plugin to load: a .py file, or a folder; may be repeated.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command()
def train(
    clip: Annotated[str | None, typer.Option(help="Clip policy, see `rlzoo clips list`.")] = None,
    config: Annotated[list[str] | None, typer.Option(help="Shipped config or YAML file; later ones win.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting, such as clip.width_high=0.02.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of sampling and data order.")] = None,
    steps: Annotated[int | None, typer.Option(help="Rollout batches to learn from.")] = None,
    output: Annotated[Path | None, typer.Option(help="Run directory, new or empty.")] = None,
    plugin: Plugins = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the complete configuration and stop.")] = False,
) -> None:
    """Train a model; without --config, the shipped model on arithmetic."""
    from rlzoo.cli import INTERRUPTED
    from rlzoo.cli.train import run

    try:
        run(
            clip=clip,
            configs=config or [],
            overrides=set_ or [],
            seed=seed,
            steps=steps,
            output=output,
            plugins=plugin or [],
            dry_run=dry_run,
        )
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


@clips.command("list")
def clips_list(plugin: Plugins = None, as_json: AsJson = False) -> None:
    """List the installed clip policies."""
    from rlzoo.cli.clips import list_policies

    list_policies(plugin or [], as_json)


@clips.command("show")
def clips_show(
    name: Annotated[str, typer.Argument(help="A policy's name.")], plugin: Plugins = None, as_json: AsJson = False
) -> None:
    """Show a policy: its formula, settings with bounds and defaults, metrics to watch, reference."""
    from rlzoo.cli.clips import show_policy

    show_policy(name, plugin or [], as_json)


@clips.command("check")
def clips_check(
    name: Annotated[str, typer.Argument(metavar="NAME|PATH", help="A policy's name, or a plugin file or folder.")],
    as_json: AsJson = False,
) -> None:
    """Hold a policy to the laws every rule keeps; exit code 1 if it breaks one."""
    from rlzoo.cli.check import check_policies

    if not check_policies(name, as_json):
        raise typer.Exit(1)


@clips.command("new")
def clips_new(
    name: Annotated[str, typer.Argument(help="Name of the new policy: lower-case words with hyphens.")],
    folder: Annotated[Path, typer.Option(help="Folder to put rlzoo-NAME in.")] = Path(),
) -> None:
    """Write a distribution with a new policy: module, test, page and packaging, ready to change."""
    from rlzoo.cli.new import write_distribution

    write_distribution(name, folder)


@app.command()
def ui(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on the loopback interface.")] = 5000,
) -> None:
    """Open MLflow's UI on the store that `rlzoo train` writes to."""
    from rlzoo.cli.ui import serve

    serve(port)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Show what is installed and what this machine can run."""
    from rlzoo.cli.doctor import report

    report(as_json)


def _version(show: bool) -> None:
    if show:
        from importlib.metadata import version

        typer.echo(f"rlzoo {version('rlzoo')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    pass
