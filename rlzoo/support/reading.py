"""Reads a file that a user named: only a regular one, of a size that its kind can have, and never waits for a writer."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

SETTINGS = 2**20
"""Bytes of the largest file of settings, YAML or JSON, in a run or a sweep."""

RECORDS = 2**31
"""Bytes of the largest file of rows that is read: questions, metrics, completions."""

_CHUNK = 2**20

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class NotReadError(OSError):
    """What a name stands for is no file that is read; ``strerror`` says why."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(0, reason, str(path))


@contextmanager
def opened(path: str | Path, most: int) -> Iterator[BinaryIO]:
    """A regular file, open for reading.

    Args:
        path: of the file; may be a link to it.
        most: bytes that it may have.

    Raises:
        NotReadError: it is something else, such as a pipe, or larger.
        OSError: there is none, or it cannot be opened.
    """
    named = Path(path)
    _check(named, named.stat(), most)  # opening some devices does something already
    descriptor = os.open(named, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        _check(named, os.fstat(descriptor), most)  # it may have been replaced in between
        yield file


def read_bytes(path: str | Path, most: int) -> bytes:
    """What a regular file holds, see `opened`."""
    content = bytearray()
    with opened(path, most) as file:
        while chunk := file.read(_CHUNK):
            content += chunk
            if len(content) > most:
                raise NotReadError(Path(path), f"grows above {most:,} bytes while it is read")
    return bytes(content)


def read_text(path: str | Path, most: int) -> str:
    """The text of a regular file in UTF-8, see `opened`; lines end as Python's own reading leaves them.

    Raises:
        UnicodeDecodeError: it is not UTF-8.
    """
    return read_bytes(path, most).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def _check(path: Path, found: os.stat_result, most: int) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise NotReadError(path, f"is {_KINDS.get(stat.S_IFMT(found.st_mode), 'something else')}, not a file")
    if found.st_size > most:
        raise NotReadError(path, f"has {found.st_size:,} bytes, more than the {most:,} that are read")
