"""What the commands that print tables share: how numbers are written, and a bar for work that is counted."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn


def number(value: float | None) -> str:
    """Three decimals, without the zero before the point; a dash for what is not known."""
    return "-" if value is None or math.isnan(value) else re.sub(r"^(-?)0\.", r"\1.", f"{value:.3f}")


def signed(value: float | None) -> str:
    """The same, with its sign."""
    return "-" if value is None else f"{'+' if value >= 0 else ''}{number(value)}"


def interval(ends: tuple[float, float] | None) -> str:
    """Both ends of an interval."""
    return "-" if ends is None else f"{number(ends[0])} {number(ends[1])}"


@contextmanager
def counted(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """A bar beside the console's own output, only on a terminal; told what is being done, how much is, and of how much."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        bar = progress.add_task("", total=None)
        yield lambda what, done, total: progress.update(bar, description=what, completed=done, total=total)
