"""`rlzoo clips portrait`: shows where rules cut off gradients and how rules weight gradients, as tables and a picture."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlzoo.cli.console import Plain
from rlzoo.cli.options import AsJson, Plugins, loading, refuse_config
from rlzoo.cli.pages import check_page
from rlzoo.cli.tables import table
from rlzoo.core.errors import UserError

if TYPE_CHECKING:
    from rlzoo.testing import Portrait

COMPARED = "grpo"  # the rule that `clips check` prints for comparison
PICTURES = (".svg", ".png")
MARK = "rlzoo clips portrait"
"""Marks a picture as a portrait."""
CURVE = tuple(2 ** (step / 8) for step in range(-16, 17))  # ratios from 1/4 to 4
DRAWN = tuple(4**step for step in range(7))  # lengths from 1 to 4096


def clips_portrait(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="Rules to draw.")],
    output: Annotated[Path, typer.Option(help="Picture to write: .svg or .png.")] = Path("portrait.svg"),
    plugin: Plugins = None,
    as_json: AsJson = False,
) -> None:
    """Draw where rules cut off gradients at each length, and how they weight gradients at each ratio."""
    if output.suffix not in PICTURES:
        raise UserError(f"--output {str(output)!r}: expected a name that ends in {' or '.join(PICTURES)}")
    check_page(output, MARK.encode(), "portrait", "--output")
    with loading():
        from rlzoo.core.zoo import load_zoo
        from rlzoo.measure import figures
        from rlzoo.testing.portrait import RATIOS, portrait
    zoo = load_zoo(plugin or [])
    for name in names:
        if name not in zoo:
            refuse_config(name)
    policies = {name: zoo[name]() for name in dict.fromkeys(names)}
    ratios = sorted({*RATIOS, *CURVE})
    edges, weights = {}, {}
    for name, policy in policies.items():
        drawn = portrait(policy, lengths=DRAWN, ratios=ratios)
        ends = ([edge.high for edge in drawn.edges.values()], [edge.low for edge in drawn.edges.values()])
        edges[name] = (figures.Series(DRAWN, ends[0]), figures.Series(DRAWN, ends[1]))
        by_sign = (list(drawn.positive.values()), list(drawn.negative.values()))
        weights[name] = (figures.Series(ratios, by_sign[0]), figures.Series(ratios, by_sign[1]))
    figure = figures.edges_and_weights(edges, weights)
    try:
        if output.suffix == ".svg":
            output.write_text(f"<!-- {MARK} -->\n{figures.svg(figure)}", encoding="utf-8")
        else:
            figure.savefig(output, dpi=150, metadata={"Software": MARK})
    except OSError as error:
        raise UserError(f"--output {str(output)!r} cannot be written: {error.strerror or error}") from error
    portraits = {name: portrait(policy) for name, policy in policies.items()}
    if as_json:
        print(json.dumps({name: as_dict(drawn) for name, drawn in portraits.items()}, indent=2))
        return
    print_portraits(Plain(), list(portraits.values()))
    print(f"wrote {output}")


def print_portraits(console: Plain, portraits: Sequence[Portrait]) -> None:
    """Print two tables, with one block per policy: cutoff log-ratios by length, and gradient weights by ratio."""
    rows = table("<", ">L", ">A>0 above", ">A<0 below", ">A<0 above")
    for drawn in portraits:
        has_inward = [
            f"{length} tokens at {edge.inward:.3g}" for length, edge in drawn.edges.items() if edge.inward is not None
        ]
        for length, edge in drawn.edges.items():
            name = drawn.name if length == next(iter(drawn.edges)) else ""
            rows.add_row(name, str(length), *(_cell(end, "+.3g") for end in (edge.high, edge.low, edge.ceiling)))
        if has_inward:
            rows.add_row("", "", f"cut below ratio 1 where A > 0: {', '.join(has_inward)}")
    console.print("log-ratio at which the gradient ends, by response length L", style="bold")
    console.print("(of a token, or the sum or mean over a response, depending on the rule)", style="dim")
    console.print(rows)
    ratios = list(portraits[0].positive)
    weights = table("<", "<", *(f">{ratio:g}" for ratio in ratios))
    for drawn in portraits:
        weights.add_row(drawn.name, "A>0", *(_cell(drawn.positive[ratio], ".3g") for ratio in ratios))
        weights.add_row("", "A<0", *(_cell(drawn.negative[ratio], ".3g") for ratio in ratios))
    console.print("\ngradient by ratio, relative to the gradient at ratio 1", style="bold")
    console.print(weights)


def as_dict(drawn: Portrait) -> dict[str, Any]:
    """Return a portrait as numbers, rounded to four significant digits."""
    edges = {str(length): _rounded(dataclasses.asdict(edge)) for length, edge in drawn.edges.items()}
    weights = {"A > 0": drawn.positive, "A < 0": drawn.negative}
    return {"edges": edges, "weights": {sign: _rounded(values) for sign, values in weights.items()}}


def _rounded(values: Mapping[Any, float | None]) -> dict[str, float | None]:
    return {f"{key}": None if value is None else float(f"{value:.4g}") for key, value in values.items()}


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"
