"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Plugins = Annotated[
    list[str] | None, typer.Option("--plugin", metavar="PATH", help="Plugin to load: a .py file, or a folder; may be repeated.")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting, such as clip.width_high=0.02.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
