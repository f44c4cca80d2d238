"""A run's metrics over its steps, a line each in the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from rich.text import Text

from rlzoo.cli.console import Plain

WIDEST, NARROWEST = 40, 8  # characters of a sparkline


class Shown(NamedTuple):
    """A metric and how it is shown.

    Example:
        ``Shown("clip/fraction", "clip fraction", "clip")``
    """

    metric: str
    label: str  # on a screen
    word: str  # in a line
    digits: int = 3

    def number(self, value: float) -> str:
        """Format a value with its digits."""
        return f"{value:,.{self.digits}f}"


SHOWN = (
    Shown("reward/mean", "reward", "reward"),
    Shown("eval/accuracy", "held-out accuracy", "accuracy"),
    Shown("clip/fraction", "clip fraction", "clip"),
    Shown("fairness/lre_max", "length error, LRE", "lre"),
    Shown("learner/entropy", "entropy", "entropy"),
    Shown("response/length_mean", "response length", "length", digits=1),
)


class Curves:
    """The values of the metrics in `SHOWN` so far, each drawn as a sparkline with its first and its last value.

    Example:
        ``curves.add({"reward/mean": 0.5})``, and ``list(curves.lines(console))`` are lines to print.
    """

    def __init__(self) -> None:
        self._values: dict[Shown, list[float]] = {shown: [] for shown in SHOWN}

    def add(self, metrics: Mapping[str, float]) -> None:
        """Take one step's metrics; one that was not measured keeps its value."""
        for shown, values in self._values.items():
            value = metrics.get(shown.metric, math.nan)
            values.extend([value] if math.isfinite(value) else values[-1:])

    def lines(self, console: Plain) -> Iterator[Text]:
        """A line for each metric that was measured, as wide as the console at most."""
        signs, arrow = ("▁▂▃▄▅▆▇█", "→") if console.encoding.startswith("utf") else (".:-=+*#@", "->")
        measured = [(shown, values) for shown, values in self._values.items() if values]
        rows = [(shown.label, shown.number(values[0]), shown.number(values[-1]), values) for shown, values in measured]
        label, first, last = (max((len(row[column]) for row in rows), default=0) for column in range(3))
        width = min(WIDEST, max(NARROWEST, console.width - label - first - last - len(arrow) - 6))
        for name, begin, now, values in rows:
            line = Text(f"{name:<{label}}  {sparkline(values, width, signs):<{width}}  ", no_wrap=True)
            line.append(f"{begin:>{first}} {arrow} ", style="dim").append(f"{now:>{last}}", style="bold")
            line.truncate(console.width)
            yield line


def sparkline(values: Sequence[float], width: int, signs: str) -> str:
    """Draw values as a row of signs from the lowest to the highest, each the mean of about equally many values.

    Example:
        >>> sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8, "▁▂▃▄▅▆▇█")
        '▁▂▃▄▅▆▇█'
    """
    means = [part.mean() for part in np.array_split(values, min(width, len(values)))]
    low, high = min(means), max(means)
    scale = (len(signs) - 1) / (high - low) if high > low else 0.0
    return "".join(signs[round((mean - low) * scale)] for mean in means)
