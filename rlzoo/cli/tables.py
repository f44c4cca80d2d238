"""How the commands that print tables write numbers."""

from __future__ import annotations

import math
import re


def number(value: float | None) -> str:
    """Three decimals, without the zero before the point; a dash for what is not known."""
    return "-" if value is None or math.isnan(value) else re.sub(r"^(-?)0\.", r"\1.", f"{value:.3f}")


def signed(value: float | None) -> str:
    """The same, with its sign."""
    return "-" if value is None else f"{'+' if value >= 0 else ''}{number(value)}"


def interval(ends: tuple[float, float] | None) -> str:
    """Both ends of an interval."""
    return "-" if ends is None else f"{number(ends[0])} {number(ends[1])}"
