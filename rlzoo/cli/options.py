"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Plugins = Annotated[
    list[str] | None, typer.Option("--plugin", metavar="PATH", help="Plugin to load: a .py file, or a folder; may be repeated.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
