"""Registers the commands. Each command imports slow libraries only when it is called."""

from __future__ import annotations

from typing import Annotated

import typer

from rlzoo.cli.calibrate import calibrate
from rlzoo.cli.command import Command, Group
from rlzoo.cli.compare import compare
from rlzoo.cli.doctor import doctor
from rlzoo.cli.evaluate import evaluate
from rlzoo.cli.fairness import fairness
from rlzoo.cli.parts import GROUPS
from rlzoo.cli.replay import replay
from rlzoo.cli.rescore import rescore
from rlzoo.cli.sweep import sweep
from rlzoo.cli.sync import sync
from rlzoo.cli.train import train
from rlzoo.cli.ui import ui
from rlzoo.support.distribution import version as version_of

app = typer.Typer(
    name="rlzoo",
    cls=Group,
    help="Train language models with any clipping rule in the zoo, and compare the rules.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command(cls=Command)(train)
app.command(cls=Command)(sync)
app.command(cls=Command)(sweep)
app.command(cls=Command)(calibrate)
app.command(cls=Command)(replay)
app.command(cls=Command)(fairness)
app.command(cls=Command)(rescore)
app.command("eval", cls=Command)(evaluate)
app.command(cls=Command)(compare)
app.command(cls=Command)(ui)
app.command(cls=Command)(doctor)
for name, group in GROUPS.items():
    app.add_typer(group, name=name)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"rlzoo {version_of()}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    pass
