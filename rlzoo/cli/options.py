"""Options that several commands share, and how all of them end when Ctrl-C stops them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

Plugins = Annotated[
    list[str] | None, typer.Option("--plugin", metavar="PATH", help="Plugin to load: a .py file, or a folder; may be repeated.")
]
Configs = Annotated[list[str] | None, typer.Option("--config", help="Shipped config or YAML file; later ones win.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting, such as clip.width_high=0.02.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print only warnings and what it all came to.")]


@contextmanager
def interruptible() -> Iterator[None]:
    """Within, Ctrl-C ends the command with its exit code, once what it has is saved."""
    from rlzoo.cli import INTERRUPTED

    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def loading(*, is_quiet: bool = False) -> Iterator[None]:
    """Within, libraries are imported, which takes seconds: a line on stderr says so while it lasts, if that is a screen."""
    from rlzoo.cli.display import Plain

    console = Plain(stderr=True)
    if is_quiet or not console.is_screen:
        yield
        return
    with console.status("starting", spinner="line"):
        yield
