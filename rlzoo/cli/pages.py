"""Where a report in HTML is written, and what it may replace: only an earlier report."""

from __future__ import annotations

from pathlib import Path

from rlzoo.errors import UserError

MARK = '<meta name="generator" content="rlzoo">'
"""Stands in the head of every report."""


def check_page(page: Path) -> None:
    """Make sure that a report can be written and replaces nothing that rlzoo did not write; call it before the work.

    Raises:
        UserError: something else has the name.
    """
    try:
        is_other = page.exists() and not (page.is_file() and MARK in _head(page))
    except OSError as error:
        raise UserError(f"report {str(page)!r} cannot be written: {error.strerror}; name another with --report") from error
    if is_other:
        raise UserError(f"{str(page)!r} exists and is not a report of rlzoo; name another file with --report, or move it away")


def write_page(page: Path, text: str) -> None:
    """Write a report.

    Raises:
        UserError: it cannot be written.
    """
    check_page(page)
    try:
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"report {str(page)!r} cannot be written: {error.strerror}; name another with --report") from error


def _head(page: Path) -> str:
    with page.open("rb") as file:
        return file.read(1000).decode(errors="replace")
