"""The clip fraction by response length as a picture in the terminal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table

from rlzoo.cli.tables import number

if TYPE_CHECKING:
    from rlzoo.measure.profile import LengthProfile

WIDTH = 40  # characters of a bar, where there is room

NARROWEST = 10


class IntervalBar:
    """A bar from 0 to a value, its interval drawn over it; plain signs where the terminal has no others.

    Example:
        A value of a half of the largest, known to within a tenth: ``━━━━━━━━━━━━━━━━├──┼──┤``.
    """

    def __init__(self, value: float, low: float, high: float, largest: float) -> None:
        self._ends = [min(1.0, part / largest) for part in (low, value, high)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw it."""
        bar, line, left, right, middle = "━─├┤┼" if options.encoding.startswith("utf") else "=-|||"
        width = min(WIDTH, options.max_width - 1)
        low, value, high = (round(width * end) for end in self._ends)
        signs = [bar if place < value else " " for place in range(width + 1)]
        for place in range(low, high + 1):
            signs[place] = line
        signs[low], signs[high], signs[value] = left, right, middle
        yield Segment("".join(signs).rstrip())

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """As wide as the longest bar."""
        return Measurement(NARROWEST, WIDTH + 1)


def clip_by_length(profile: LengthProfile) -> Table:
    """A row for each length bin that holds any response: lengths, bar with a 95 % interval, and the numbers."""
    table = Table(box=None, pad_edge=False, show_header=False, title="clip fraction by response length", title_justify="left")
    table.title_style = "bold"
    table.add_column(justify="right", no_wrap=True)
    table.add_column()  # what gives way on a narrow screen
    table.add_column(no_wrap=True)
    both = profile.both
    known = [high for high in both.high if not math.isnan(high)]
    largest = max([0.01, *known])
    for k, label in enumerate(profile.bin_labels()):
        if both.count[k]:
            numbers = (both.fraction[k], both.low[k], both.high[k])
            share, low, high = map(number, numbers)
            table.add_row(label, IntervalBar(*numbers, largest), f"{share} [{low}, {high}]")
    return table
