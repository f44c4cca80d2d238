"""A page of figures and tables: HTML that is complete in itself."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

from jinja2 import Environment, select_autoescape
from markupsafe import Markup, escape

from rlzoo.measure.figures import svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Cell = str | float | int | None


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text and numbers under a caption; None is a value that is not known."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True, slots=True)
class ReportSection:
    """A heading with paragraphs, figures and tables under it; words between backticks are set as code."""

    title: str
    paragraphs: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()


def render(title: str, facts: Mapping[str, str], sections: Sequence[ReportSection]) -> str:
    """One HTML page without scripts or anything to fetch; whatever it is given is shown as text.

    Args:
        title: of the page.
        facts: what the page is about, name and value.
        sections: in order.
    """
    environment = Environment(
        autoescape=select_autoescape(default=True, default_for_string=True), trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": number, "code": _code, "svg": lambda figure: Markup(svg(figure))}
    source = resources.files("rlzoo").joinpath("assets", "report.html.j2").read_text(encoding="utf-8")
    return str(environment.from_string(source).render(title=title, facts=facts, sections=sections))


def number(value: Cell) -> str:
    """A table cell: three digits that count, a dash for what is not known, and text as it is."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "\u2013"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else value


def _code(text: str) -> Markup:
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))
