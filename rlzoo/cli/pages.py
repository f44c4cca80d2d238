"""Writes reports and pictures. Only files that rlzoo wrote earlier are overwritten."""

from __future__ import annotations

from pathlib import Path

from rlzoo.core.errors import UserError
from rlzoo.measure.report import MARK
from rlzoo.support.atomic import write_text


def check_page(page: Path, mark: bytes = MARK, kind: str = "report", option: str = "--report") -> None:
    """Raise `UserError` if a report or picture would overwrite a file without ``mark``, which rlzoo puts in its files."""
    if not (page.exists() or page.is_symlink()):  # writing to a dangling link would create its target
        return
    if page.is_file():
        with page.open("rb") as file:
            if mark in file.read(1000):
                return
    raise UserError(f"{str(page)!r} exists and is not an rlzoo {kind}; move it away, or choose another file with {option}")


def write_page(page: Path, text: str, mark: bytes = MARK, kind: str = "report", option: str = "--report") -> None:
    """Write a report or a table.

    Raises:
        UserError: the file exists and has no ``mark``, or it cannot be written.
    """
    check_page(page, mark, kind, option)
    try:
        write_text(page, text.encode("utf-8", "backslashreplace").decode(), "page")  # a path can contain invalid Unicode
    except OSError as error:
        raise UserError(f"{str(page)!r} cannot be written: {error.strerror}; choose another with {option}") from error
