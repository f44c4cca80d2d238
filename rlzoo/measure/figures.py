"""Builds matplotlib figures of curves, profiles by response length, and intervals."""

from __future__ import annotations

import hashlib
import io
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from rlzoo.measure.colours import rule_colours

MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLES = ("-", "--", ":", "-.")
LONGEST_LABEL, LONGEST_TITLE = 36, 80  # maximum characters in a line; longer lines would leave no room for the data
MOST_BANDS = 6  # maximum number of bands, because more would hide each other


@dataclass(frozen=True, slots=True)
class Series:
    """The points of one curve and the ends of their intervals."""

    x: Sequence[float]
    y: Sequence[float | None]  # None and NaN are not plotted
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    raw: Sequence[float] | None = None  # ``y`` before smoothing, plotted as dots


def lines(series: Mapping[str, Series], *, xlabel: str, ylabel: str) -> Figure:
    """Plot curves, with bands between their ``low`` and ``high`` values unless there are many curves."""
    figure, axes = _canvas("", xlabel, ylabel)
    for (label, points), look in zip(series.items(), _looks(series, marker=False), strict=True):
        axes.plot(points.x, np.array(points.y, dtype=float), label=_literal(label), **look)
        if points.raw is not None:
            axes.plot(points.x, np.array(points.raw, dtype=float), ".", color=look["color"], markersize=3, alpha=0.5)
        if points.low is not None and points.high is not None and len(series) <= MOST_BANDS:
            axes.fill_between(points.x, points.low, points.high, color=look["color"], alpha=0.15, linewidth=0)
    _legend(figure, axes)
    return figure


def plot_by_length(series: Mapping[str, Series], *, ylabel: str = "clip fraction", title: str = "") -> Figure:
    """Plot a quantity against response length on a logarithmic axis, with error bars side by side."""
    figure, axes = _canvas(title, "response length in tokens", ylabel)
    step = min(0.012, 0.1 / max(1, len(series)))  # spread the points of a bin over at most 10% of its length
    for number, ((label, points), style) in enumerate(zip(series.items(), _looks(series), strict=True)):
        shift = 1 + step * (number - (len(series) - 1) / 2)
        x, y = np.array(points.x), np.array(points.y, dtype=float)
        kept = (x > 0) & ~np.isnan(y)
        errors = None
        if points.low is not None and points.high is not None:
            errors = np.maximum(0.0, [y - points.low, points.high - y])[:, kept]
        look = {"capsize": 2, "elinewidth": 0.9, "clip_on": False, **style}
        axes.errorbar(x[kept] * shift, y[kept], yerr=errors, label=_literal(label), **look)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    shortest, longest = axes.get_xlim()
    if longest < 4 * shortest:  # a short range may contain no power of two
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set_ylim(bottom=0.0)
    _legend(figure, axes)
    return figure


def forest(rows: Sequence[tuple[str, float, tuple[float, float] | None]], *, xlabel: str) -> Figure:
    """Plot a point and an interval for each label, with the first label on top."""
    labels, places = [_literal(label) for label, *_ in rows], list(range(len(rows), 0, -1))
    height = 0.1 + 0.18 * max((label.count("\n") + 1 for label in labels), default=1)  # height of a row in inches
    figure, axes = _canvas("", xlabel, "", height=1.1 + height * max(1, len(rows)))
    for place, colour, (_, value, interval) in zip(places, rule_colours(label for label, *_ in rows), rows, strict=True):
        if interval is not None:
            axes.plot(interval, [place, place], color=colour, linewidth=1.5)
        axes.plot([value], [place], "o", color=colour, markersize=5)
    axes.set_yticks(places, labels)
    axes.xaxis.set_major_locator(MaxNLocator(5))  # more numbers would overlap beside long labels
    axes.set_ylim(0.4, len(rows) + 0.6)
    return figure


def svg(figure: Figure) -> str:
    """Render the figure as an ``<svg>`` element that keeps text as text. Equal figures give identical bytes."""
    stream = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "rlzoo"}):
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # repeating the layout would give slightly different coordinates
        figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    name = hashlib.sha256(text.encode()).hexdigest()[:8]  # IDs must differ between the figures of a page
    return re.sub(r"<[^>]*>", lambda tag: re.sub(r'(\bid="|xlink:href="#|url\(#)', rf"\g<1>{name}-", tag[0]), text)


def _canvas(title: str, xlabel: str, ylabel: str, height: float = 3.6) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.4, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(_literal(title, LONGEST_TITLE), fontsize=10, loc="left")
    axes.set_xlabel(_literal(xlabel))
    axes.set_ylabel(_literal(ylabel))
    axes.grid(visible=True, color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _looks(labels: Iterable[str], *, marker: bool = True) -> list[dict[str, Any]]:
    """Return the colour, marker and line style of each series. The line style distinguishes series of the same colour."""
    looks, seen = [], Counter[str]()
    for number, colour in enumerate(rule_colours(labels)):
        look: dict[str, Any] = {"color": colour, "linestyle": STYLES[seen[colour] % len(STYLES)], "linewidth": 1.4}
        seen[colour] += 1
        looks.append(look | ({"marker": MARKERS[number % len(MARKERS)], "markersize": 4.5} if marker else {}))
    return looks


def _legend(figure: Figure, axes: Axes) -> None:
    """Place the legend beside the data."""
    number = len(axes.get_legend_handles_labels()[0])
    if number:
        size, spacing = (8, 0.5) if number <= 14 else (6.5, 0.25)  # 25 entries fit in one column
        columns = 1 + (number - 1) // 25
        figure.legend(loc="outside right upper", fontsize=size, labelspacing=spacing, frameon=False, ncols=columns)


def _literal(label: str, longest: int = LONGEST_LABEL) -> str:
    """Escape a label so that matplotlib shows it literally, wrap it between words, and shorten long words in the middle."""
    words = (
        word if len(word) <= longest else f"{word[: longest // 2 - 1]}…{word[-(longest // 2) :]}" for word in label.split(" ")
    )
    shown = "\n".join(textwrap.wrap(" ".join(words), longest, break_long_words=False, break_on_hyphens=False))
    shown = shown.replace("$", r"\$")
    return f"\u200b{shown}" if shown.startswith("_") else shown  # matplotlib hides labels that start with an underscore
