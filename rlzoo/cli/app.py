"""Registers the commands. Each command imports slow libraries only when it is called."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from rlzoo.cli.calibrate import calibrate
from rlzoo.cli.compare import compare
from rlzoo.cli.doctor import doctor
from rlzoo.cli.evaluate import evaluate
from rlzoo.cli.fairness import fairness
from rlzoo.cli.parts import GROUPS
from rlzoo.cli.race import app as race
from rlzoo.cli.replay import replay
from rlzoo.cli.rescore import rescore
from rlzoo.cli.runs import runs
from rlzoo.cli.sweep import sweep
from rlzoo.cli.sync import sync
from rlzoo.cli.train import train
from rlzoo.cli.ui import ui
from rlzoo.core.errors import UserError
from rlzoo.support.distribution import version as version_of

# commands that run in a single process
ALONE = ("calibrate", "compare", "eval", "fairness", "race", "replay", "rescore", "sweep")

app = typer.Typer(
    name="rlzoo",
    help="Train language models with any clipping rule in the zoo, and compare the rules.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (train, sync, sweep, calibrate, replay, fairness, rescore, evaluate, compare, ui, doctor):
    app.command("eval" if command is evaluate else None)(command)
for name, group in {**GROUPS, "race": race, "runs": runs}.items():
    app.add_typer(group, name=name)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"rlzoo {version_of()}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    command, size = context.invoked_subcommand, os.environ.get("WORLD_SIZE", "1")
    if command in ALONE and size != "1":
        raise UserError(f"{command} runs in one process, but the environment has WORLD_SIZE={size}; unset it")
