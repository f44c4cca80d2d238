"""`rlzoo clips portrait`: shows in tables where rules cut off gradients and how they weight them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from rlzoo.cli.console import Plain
from rlzoo.cli.kinds import CLIPS
from rlzoo.cli.options import Plugins, loading
from rlzoo.cli.tables import table

if TYPE_CHECKING:
    from rlzoo.testing import Portrait

COMPARED = "grpo"  # the rule that `clips check` prints for comparison


def clips_portrait(
    names: Annotated[list[str], typer.Argument(metavar="NAME|PATH", help="Rules to show, or plugin files or folders.")],
    plugin: Plugins = None,
) -> None:
    """Show where rules clip, and how they weight gradients. Edges are listed by length, weights by ratio."""
    with loading():
        from rlzoo.testing.portrait import portrait
    found = [entry for name in names for entry in CLIPS.find(name, plugin)[1]]
    print_portraits(Plain(), [portrait(kind()) for kind in dict.fromkeys(entry.kind for entry in found)])


def print_portraits(console: Plain, portraits: Sequence[Portrait]) -> None:
    """Print two tables, with one block per rule: cutoff log-ratios by length, and gradient weights by ratio."""
    rows = table("<", ">L", ">A>0 above", ">A>0 below", ">A<0 below", ">A<0 above")
    for drawn in portraits:
        for length, edge in drawn.edges.items():
            name = drawn.name if length == next(iter(drawn.edges)) else ""
            rows.add_row(name, str(length), *(_cell(end, "+.3g") for end in (edge.high, edge.inward, edge.low, edge.ceiling)))
    console.print("log-ratio at which the gradient ends, by response length L", style="bold")
    console.print("(of a token, or a response's sum or mean, depending on the rule; progress is 0.5)", style="dim")
    console.print(rows)
    ratios = list(portraits[0].positive)
    weights = table("<", "<", *(f">{ratio:g}" for ratio in ratios))
    for drawn in portraits:
        weights.add_row(drawn.name, "A>0", *(_cell(drawn.positive[ratio], ".3g") for ratio in ratios))
        weights.add_row("", "A<0", *(_cell(drawn.negative[ratio], ".3g") for ratio in ratios))
    console.print("\ngradient by ratio, relative to the gradient at ratio 1", style="bold")
    console.print(weights)


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"
