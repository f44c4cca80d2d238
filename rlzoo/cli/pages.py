"""Writes HTML reports, and never overwrites anything but earlier reports."""

from __future__ import annotations

from pathlib import Path

from rlzoo.errors import UserError

MARK = b'<meta name="generator" content="rlzoo">'
"""Marks a file as a report; every report has it in its head."""


def check_page(page: Path) -> None:
    """Check before the work begins that a report would not overwrite a file that rlzoo did not write.

    Raises:
        UserError: the path exists and is not a report.
    """
    if not (page.exists() or page.is_symlink()):  # a link to a file that does not exist would create it
        return
    if page.is_file():
        with page.open("rb") as file:
            if MARK in file.read(1000):
                return
    raise UserError(f"{str(page)!r} exists and is not an rlzoo report; move it away, or choose another file with --report")


def write_page(page: Path, text: str) -> None:
    """Write a report.

    Raises:
        UserError: the path exists and is not a report, or it cannot be written.
    """
    check_page(page)
    try:
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"report {str(page)!r} cannot be written: {error.strerror}; choose another with --report") from error
