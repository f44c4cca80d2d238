"""Renders figures and tables as one self-contained HTML page."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Cell = str | float | int | tuple[float, float] | None  # a pair is an interval, and None is an unknown value
Row = list[Cell]
INTERVALS = ("95 %", "lowest and highest")  # columns that become two columns of a CSV file or a data frame

MARK = b'<meta name="generator" content="rlzoo">'
"""Element in the head of every report, which marks the file as a report."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text and numbers."""

    caption: str  # may be empty
    columns: Sequence[str]
    rows: Sequence[Row]
    note: str = ""  # how the numbers were obtained

    def flat(self) -> tuple[list[str], list[Row]]:
        """Return the column names and the rows. An interval takes two columns, and an unknown number is None."""
        heads, rows = list[str](), []
        for before, name in zip(("", *self.columns), self.columns, strict=False):
            heads += (f"{before} {name} low", f"{before} {name} high") if name in INTERVALS else (name,)
        for row in self.rows:
            cells: Row = []
            for name, cell in zip(self.columns, row, strict=True):
                pair = cell if isinstance(cell, tuple) else (None, None)
                cells += pair if name in INTERVALS else (None if isinstance(cell, float) and math.isnan(cell) else cell,)
            rows.append(cells)
        return heads, rows

    def to_pandas(self) -> Any:
        """Return the table as a pandas data frame, with the columns and rows of `flat`."""
        import pandas as pd  # imported here because it takes a second; MLflow requires pandas

        heads, rows = self.flat()
        return pd.DataFrame(rows, columns=heads)


class Tabular:
    """A result that consists of tables. The first table contains the main numbers."""

    __slots__ = ()

    def tables(self) -> Iterable[Table]:
        """Return the tables."""
        raise NotImplementedError

    @property
    def rows(self) -> list[dict[str, Cell]]:
        """The rows of the first table as dicts. An interval has two keys, and an unknown number is NaN or None."""
        rows: list[dict[str, Cell]] = self.to_pandas().to_dict("records")
        return rows

    def to_pandas(self) -> Any:
        """Return the first table as a pandas data frame."""
        return next(iter(self.tables())).to_pandas()

    def __repr__(self) -> str:
        return str(self.to_pandas().round(3).to_string())


@dataclass(frozen=True, slots=True)
class ReportSection:
    """A heading with paragraphs, figures and tables. Text in backticks is formatted as code."""

    title: str
    paragraphs: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()


def render(title: str, facts: Mapping[str, str], sections: Sequence[ReportSection]) -> str:
    """Render an HTML page with ``facts`` at the top. It has no scripts or external resources, and all input is escaped."""
    from rlzoo.measure.figures import svg  # imports matplotlib, which a run does not need

    pages = environment(code=_code, svg=lambda figure: Markup(svg(figure)))
    return str(pages.get_template("report.html.j2").render(title=title, facts=facts, sections=sections))


def environment(**filters: Callable[..., str]) -> Environment:
    """Return the jinja2 environment for rlzoo's pages, which escapes all input. ``filters`` are added to `number`."""
    pages = Environment(loader=PackageLoader("rlzoo.measure", "assets"), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    pages.filters.update(number=number, **filters)
    return pages


def number(value: Cell) -> str:
    """Format a table cell: numbers with three decimals or digits, unknown values as a dash, and text unchanged."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "\u2013"
    if isinstance(value, tuple):
        return " to ".join(map(number, value))
    if isinstance(value, float):
        return f"{value:{'.3f' if 0.0005 <= abs(value) < 9.9995 else '.3g' if abs(value) < 999.5 else ',.0f'}}"
    return f"{value:,}" if isinstance(value, int) else value


def _code(text: str) -> Markup:
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))
