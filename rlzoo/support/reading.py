"""Reads users' text files and gives advice if a file cannot be read."""

from __future__ import annotations

from pathlib import Path


def remedy(error: Exception, for_damage: str) -> str:
    """Return advice about a file that cannot be read: ``for_damage`` unless the operating system denied access."""
    return "check the permissions of the file and its folders" if isinstance(error, OSError) else for_damage


def read_text(path: str | Path) -> str:
    r"""Return the text of a UTF-8 file without a byte-order mark and with ``\n`` as its line endings.

    Raises:
        OSError: the file cannot be read.
        UnicodeDecodeError: the file is not UTF-8.
    """
    return Path(path).read_text(encoding="utf-8-sig")
