"""A run's metrics over its steps, small enough for a line each in the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

from rich.text import Text

from rlzoo.cli.display import Plain

MOST = 256
"""Points a curve is kept in, whatever the number of steps."""

WIDEST = 40
"""Characters of a sparkline."""

NARROWEST = 8


@dataclass(frozen=True, slots=True)
class Shown:
    """A metric and how it is shown.

    Example:
        ``Shown("clip/fraction", "clip fraction", "clip")``
    """

    metric: str
    label: str  # on a screen
    word: str  # in a line
    digits: int = 3

    def number(self, value: float) -> str:
        """A value with its digits."""
        return f"{value:,.{self.digits}f}"


SHOWN = (
    Shown("reward/mean", "reward", "reward"),
    Shown("eval/accuracy", "held-out accuracy", "accuracy"),
    Shown("clip/fraction", "clip fraction", "clip"),
    Shown("fairness/lre_max", "length error, LRE", "lre"),
    Shown("learner/entropy", "entropy", "entropy"),
    Shown("response/length_mean", "response length", "length", digits=1),
)


@dataclass(slots=True)
class Curve:
    """One metric over the steps so far, in at most `MOST` points, each the mean of equally many steps.

    Example:
        After ``curve.add(1.0)`` and ``curve.add(2.0)``, ``curve.points`` is ``[1.0, 2.0]``.
    """

    points: list[float] = field(default_factory=list)
    first: float = math.nan
    last: float = math.nan
    _steps: int = 1  # in a point
    _waiting: list[float] = field(default_factory=list)  # for the next point

    def add(self, value: float) -> None:
        """Take the value of one more step."""
        if math.isnan(self.first):
            self.first = value
        self.last = value
        self._waiting.append(value)
        if len(self._waiting) < self._steps:
            return
        self.points.append(fmean(self._waiting))
        self._waiting.clear()
        if len(self.points) == MOST:
            self.points = [fmean(pair) for pair in zip(self.points[::2], self.points[1::2], strict=True)]
            self._steps *= 2


class Curves:
    """What a run came to so far: for each of the metrics in `SHOWN` that it has, a sparkline, the first value and the last.

    Example:
        ``curves.add({"reward/mean": 0.5})``, and ``list(curves.lines(console))`` are lines to print.
    """

    def __init__(self) -> None:
        self._curves: dict[str, Curve] = {}

    def add(self, metrics: Mapping[str, float]) -> None:
        """Take one step's metrics; one that was not measured in it stays as it was."""
        for shown in SHOWN:
            value = metrics.get(shown.metric)
            if value is not None and math.isfinite(value):
                self._curves.setdefault(shown.metric, Curve()).add(value)
            elif shown.metric in self._curves:
                self._curves[shown.metric].add(self._curves[shown.metric].last)

    def lines(self, console: Plain) -> Iterator[Text]:
        """A line for each metric, as wide as the console at most."""
        is_utf = console.encoding.startswith("utf")
        signs, arrow = ("▁▂▃▄▅▆▇█", "→") if is_utf else (".:-=+*#@", "->")
        rows = [(shown, self._curves[shown.metric]) for shown in SHOWN if shown.metric in self._curves]
        numbers = [(shown.number(curve.first), shown.number(curve.last)) for shown, curve in rows]
        first, last = (max((len(pair[side]) for pair in numbers), default=0) for side in (0, 1))
        label = max((len(shown.label) for shown, _ in rows), default=0)
        width = min(WIDEST, max(NARROWEST, console.width - label - first - last - len(arrow) - 6))
        for (shown, curve), (begin, now) in zip(rows, numbers, strict=True):
            line = Text(f"{shown.label:<{label}}  {sparkline(curve.points, width, signs):<{width}}  ", no_wrap=True)
            line.append(f"{begin:>{first}} {arrow} ", style="dim").append(f"{now:>{last}}", style="bold")
            line.truncate(console.width)
            yield line


def sparkline(values: Sequence[float], width: int, signs: str) -> str:
    """Values as a row of signs from the lowest to the highest, each the mean of about equally many values.

    Example:
        >>> sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8, "▁▂▃▄▅▆▇█")
        '▁▂▃▄▅▆▇█'
    """
    number = min(width, len(values))
    cuts = [place * len(values) // number for place in range(number + 1)] if number else []
    means = [fmean(values[begin:end]) for begin, end in pairwise(cuts)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    scale = (len(signs) - 1) / (high - low) if high > low else 0.0
    return "".join(signs[round((mean - low) * scale)] for mean in means)
