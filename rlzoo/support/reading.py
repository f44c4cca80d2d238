"""Opens files named by a user if they are regular files below a size limit."""

from __future__ import annotations

import io
import stat
from pathlib import Path
from typing import BinaryIO

SETTINGS = 2**20  # maximum size in bytes of a YAML or JSON settings file
RECORDS = 2**31  # maximum size in bytes of a file of records: questions, metrics, completions


class NotReadError(OSError):
    """Raised when a file has the wrong type or is too large; ``strerror`` says which."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(0, reason, str(path))


def remedy(error: Exception, for_damage: str) -> str:
    """Return what to do about a file that cannot be read: ``for_damage``, unless the system did not let us read it."""
    is_whole = isinstance(error, OSError) and not isinstance(error, NotReadError)
    return "check the permissions of the file and its folders" if is_whole else for_damage


def opened(path: str | Path, most: int) -> BinaryIO:
    """Open a regular file for reading.

    Args:
        path: path of the file or of a link to it.
        most: maximum size in bytes.

    Raises:
        NotReadError: the file is too large or not a regular file, such as a pipe.
        OSError: the file does not exist or cannot be opened.
    """
    path = Path(path)
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        kind = "folder" if stat.S_ISDIR(found.st_mode) else "pipe, socket or device"
        raise NotReadError(path, f"is a {kind}, not a file")
    if found.st_size > most:
        raise NotReadError(path, f"has {found.st_size:,} bytes (at most {most:,} are allowed)")
    return path.open("rb")


def read_bytes(path: str | Path, most: int) -> bytes:
    """Return the content of a regular file; see `opened`."""
    with opened(path, most) as file:
        return file.read()


def read_text(path: str | Path, most: int) -> str:
    r"""Return the text of a regular UTF-8 file with line ends as ``\n``, without a byte-order mark; see `opened`.

    Raises:
        UnicodeDecodeError: the file is not UTF-8.
    """
    with io.TextIOWrapper(opened(path, most), encoding="utf-8-sig") as file:
        return file.read()
