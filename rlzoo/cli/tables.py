"""Formats tables and numbers for all commands and writes them to files."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlzoo.cli.pages import check_page, write_page
from rlzoo.core.errors import UserError
from rlzoo.measure.colours import rule_colour
from rlzoo.measure.report import Cell, environment
from rlzoo.measure.report import Table as ReportTable
from rlzoo.measure.report import number as rounded

LATEX = b"% Written by rlzoo"  # first line of a LaTeX file
LATEX_ESCAPES = str.maketrans(
    {
        **{char: f"\\{char}" for char in "&%$#_{}"},
        **{char: f"${char}$" for char in "<>|"},
        "\\": r"\textbackslash{}",
        "\u2013": "--",
        "\n": " ",  # a folder's name in a comment may contain a line break
    }
)


def table(*columns: str, **options: Any) -> Table:
    """Create a table without a frame. Each column name begins with ``<`` (left-aligned) or ``>`` (right-aligned)."""
    rows = Table(box=None, pad_edge=False, title_justify="left", **options)
    for column in columns:
        rows.add_column(column[1:], justify="right" if column[0] == ">" else "left", no_wrap=column[0] == ">", overflow="fold")
    return rows


def report_table(content: ReportTable) -> Table:
    """Format a report's table of numbers for the terminal. The first column is text."""
    first, *others = content.columns
    rows = table(f"<{first}", *(f">{column}" for column in others), title=content.caption or None)
    for row in content.rows:
        rows.add_row(*map(_shown, row))
    return rows


def check_files(csv_file: Path | None, latex: Path | None, report: Path | None = None, differences: Path | None = None) -> None:
    """Raise `UserError` if a folder is missing, a report is not named .html, or rlzoo did not write the existing LaTeX file."""
    pages = (("--report", report), ("--differences", differences))
    for option, file in (("--csv", csv_file), ("--latex", latex), *pages):
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            raise UserError(f"{option} {str(file)!r}: expected the name of a file in an existing folder")
    for option, file in pages:
        if file is not None and file.suffix not in (".html", ".htm"):
            raise UserError(f"{option} {str(file)!r}: a report is an HTML page; name it .html, or use --csv or --latex")
    if latex is not None:
        check_page(latex, LATEX, "table", "--latex")


def save_tables(tables: Sequence[ReportTable], csv_file: Path | None, latex: Path | None) -> None:
    """Write rounded tables to one LaTeX file, and write each table at full precision to a separate CSV file.

    The first table goes to ``csv_file``. Other tables with rows go to files named after their captions. In CSV, an interval
    takes two columns, and an unknown number is an empty cell. An existing CSV file is replaced only if it has the same columns.
    """
    tables = [*tables[:1], *(content for content in tables[1:] if content.rows)]
    for place, content in enumerate(tables):
        if csv_file is not None:
            words = re.sub("[^a-z0-9]+", "-", content.caption.lower()).strip("-") or place + 1
            file, text = csv_file.with_stem(f"{csv_file.stem}-{words}") if place else csv_file, _as_csv(content)
            write_page(file, text, text.partition("\n")[0].encode()[:900], "table with these columns", "--csv")
    if latex is not None:
        pages = environment(latex=lambda cell: Markup(rounded(cell).translate(LATEX_ESCAPES)))
        write_page(latex, pages.get_template("tables.tex.j2").render(tables=tables), LATEX, "table", "--latex")


def _as_csv(content: ReportTable) -> str:
    stream, (heads, rows) = io.StringIO(), content.flat()
    csv.writer(stream, lineterminator="\n").writerows([heads, *rows])
    return stream.getvalue()


def _shown(cell: Cell) -> str:
    if isinstance(cell, str | int):
        return str(cell)
    return interval(cell) if isinstance(cell, tuple) else number(cell)


def rule_label(label: str, console: Console) -> Text:
    """Return a rule's label, preceded by a dot in the rule's colour if the console has colours."""
    return Text.assemble(("● ", rule_colour(label)), label) if console.color_system else Text(label)


def number(value: float | None) -> str:
    """Format a number with three decimal places and no leading zero. An unknown value becomes a dash."""
    return "-" if value is None or math.isnan(value) else re.sub(r"^(-?)0\.", r"\1.", f"{value:.3f}")


def signed(value: float | None) -> str:
    """Format a number like `number`, but always with a sign."""
    return "-" if value is None else f"{'+' if value >= 0 else ''}{number(value)}"


def interval(ends: tuple[float, float] | None) -> str:
    """Format both ends of an interval."""
    return "-" if ends is None else f"{number(ends[0])} {number(ends[1])}"
