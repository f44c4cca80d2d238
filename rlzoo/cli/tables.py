"""Tables and numbers as all commands print them."""

from __future__ import annotations

import math
import re
from typing import Any

from rich.table import Table


def table(*columns: str, **options: Any) -> Table:
    """A table without a frame; a column's name begins with ``<`` or ``>``, to which side its text goes."""
    made = Table(box=None, pad_edge=False, title_justify="left", **options)
    for column in columns:
        made.add_column(column[1:], justify="right" if column[0] == ">" else "left", no_wrap=column[0] == ">")
    return made


def number(value: float | None) -> str:
    """Three decimals, without the zero before the point; a dash for an unknown value."""
    return "-" if value is None or math.isnan(value) else re.sub(r"^(-?)0\.", r"\1.", f"{value:.3f}")


def signed(value: float | None) -> str:
    """The same, with its sign."""
    return "-" if value is None else f"{'+' if value >= 0 else ''}{number(value)}"


def interval(ends: tuple[float, float] | None) -> str:
    """Both ends of an interval."""
    return "-" if ends is None else f"{number(ends[0])} {number(ends[1])}"
