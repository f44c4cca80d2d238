"""Formats tables and numbers for all commands."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlzoo.measure.colours import rule_colour

if TYPE_CHECKING:
    from rlzoo.measure.report import Table as ReportTable


def table(*columns: str, **options: Any) -> Table:
    """Create a table without a frame; each column name begins with ``<`` (left-aligned) or ``>`` (right-aligned)."""
    rows = Table(box=None, pad_edge=False, title_justify="left", **options)
    for column in columns:
        rows.add_column(column[1:], justify="right" if column[0] == ">" else "left", no_wrap=column[0] == ">")
    return rows


def report_table(content: ReportTable) -> Table:
    """Format a report's table of numbers for the terminal; the first column is text."""
    first, *others = content.columns
    rows = table(f"<{first}", *(f">{column}" for column in others), title=content.caption or None)
    for row in content.rows:
        cells = (interval(cell) if isinstance(cell, tuple) else cell if isinstance(cell, str) else number(cell) for cell in row)
        rows.add_row(*cells)
    return rows


def rule_label(label: str, console: Console) -> Text:
    """Return a rule's label; if the console has colours, a dot in the rule's colour precedes it."""
    return Text.assemble(("● ", rule_colour(label)), label) if console.color_system else Text(label)


def number(value: float | None) -> str:
    """Format a number with three decimals and no leading zero; an unknown value is a dash."""
    return "-" if value is None or math.isnan(value) else re.sub(r"^(-?)0\.", r"\1.", f"{value:.3f}")


def signed(value: float | None) -> str:
    """Format a number like `number`, but always with a sign."""
    return "-" if value is None else f"{'+' if value >= 0 else ''}{number(value)}"


def interval(ends: tuple[float, float] | None) -> str:
    """Format both ends of an interval."""
    return "-" if ends is None else f"{number(ends[0])} {number(ends[1])}"
