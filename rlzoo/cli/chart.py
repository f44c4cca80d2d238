"""Plots the clip fraction by response length in the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from rlzoo.cli.console import Plain
from rlzoo.cli.tables import number, table

if TYPE_CHECKING:
    from rlzoo.measure.profile import LengthProfile

WIDEST, NARROWEST = 40, 10  # width of a bar in characters
BESIDE = 34  # width in characters of the columns next to a bar: lengths and numbers


def clip_by_length(profile: LengthProfile, console: Plain) -> Table:
    """Return a table with one row per non-empty length bin: its lengths, a bar with a 95% interval, and the numbers."""
    rows = table(">", "<", "<", title="clip fraction by response length, all steps", show_header=False)
    both = profile.both
    largest = max([0.01, *(high for high in both.high if not math.isnan(high))])
    width = max(NARROWEST, min(WIDEST, console.width - BESIDE))
    signs = "━─├┤┼" if console.encoding.startswith("utf") else "=-|||"
    for k, label in enumerate(profile.bin_labels()):
        if both.count[k]:
            low, share, high = both.low[k], both.fraction[k], both.high[k]
            ends = [round(width * min(1.0, end / largest)) for end in (low, share, high)]
            rows.add_row(label, interval_bar(ends, signs), f"{number(share)} [{number(low)}, {number(high)}]")
    return rows


def interval_bar(ends: Sequence[int], signs: str) -> str:
    """Draw a bar from 0 to a value, overlaid with the value's interval.

    ``ends`` contains the low end of the interval, the value, and the high end.

    Example:
        >>> interval_bar([16, 19, 22], "━─├┤┼")
        '━━━━━━━━━━━━━━━━├──┼──┤'
    """
    low, value, high = ends
    bar = [signs[0]] * low + [signs[1]] * (high - low + 1)
    for place, sign in zip((low, high, value), signs[2:], strict=True):
        bar[place] = sign
    return "".join(bar)
