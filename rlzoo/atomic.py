"""Files and folders that are written under a temporary name first, so that they are either complete or not there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def temporary_path(path: Path, key: str) -> Path:
    """The name under which a file or folder is written before it gets its own.

    Args:
        path: its own name.
        key: a random name that only the writer knows of, such as the identity of a run. A file with another key, or with
            none, belongs to somebody else.
    """
    return path.with_name(f".{path.name}.{key[:16]}.part")


def write_text(file: Path, text: str, key: str) -> None:
    """Write a file that is either the old or the new one, whatever happens; on the disk before this returns."""
    temporary = temporary_path(file, key)
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(file)
    sync(file.parent)


def remove_temporary(temporary: Path) -> None:
    """Remove what an earlier process left under the temporary name of its own, if anything."""
    if temporary.is_dir() and not temporary.is_symlink():
        shutil.rmtree(temporary)
    else:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
