"""Renders figures and tables as one self-contained HTML page."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Cell = str | float | int | tuple[float, float] | None  # a pair is an interval, and None is an unknown value
Row = list[Cell]

MARK = b'<meta name="generator" content="rlzoo">'
"""Marks a file as a report; every report has it in its head."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text and numbers."""

    caption: str  # may be empty
    columns: Sequence[str]
    rows: Sequence[Row]


@dataclass(frozen=True, slots=True)
class ReportSection:
    """A heading with paragraphs, figures and tables; text in backticks is formatted as code."""

    title: str
    paragraphs: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()


def render(title: str, facts: Mapping[str, str], sections: Sequence[ReportSection]) -> str:
    """Render an HTML page with ``facts`` at the top; it has no scripts or external resources, and all input is escaped."""
    from rlzoo.measure.figures import svg  # imports matplotlib, which a run does not need before its first figure

    pages = environment(code=_code, svg=lambda figure: Markup(svg(figure)))
    return str(pages.get_template("report.html.j2").render(title=title, facts=facts, sections=sections))


def environment(**filters: Callable[..., str]) -> Environment:
    """Return jinja2's environment for rlzoo's pages, which escapes all input, with filters in addition to `number`."""
    pages = Environment(loader=PackageLoader("rlzoo.measure", "assets"), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    pages.filters.update(number=number, **filters)
    return pages


def number(value: Cell) -> str:
    """Format a table cell: three significant digits, a dash for an unknown value, and text unchanged."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "\u2013"
    if isinstance(value, tuple):
        return " to ".join(map(number, value))
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else value


def _code(text: str) -> Markup:
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))
