"""Checksums of a folder's files, by which a damaged or changed checkpoint is recognised."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from rlzoo.support.atomic import remove_files, sync
from rlzoo.support.reading import SETTINGS, read_text

FILE = "manifest.json"


def seal(folder: Path, is_own: Callable[[str], bool] = lambda name: True) -> None:
    """Write ``manifest.json``, the SHA-256 of the files beneath; all of it is on the disk before this returns.

    Args:
        folder: that is complete.
        is_own: whether a file, by its name below the folder, belongs to it. Others stay in the folder and are not sealed.
    """
    names = {str(path.relative_to(folder)): path for path in _files(folder)}
    files = {name: _checksum(path) for name, path in names.items() if is_own(name)}
    (folder / FILE).write_text(json.dumps(files, indent=2) + "\n", encoding="utf-8")
    for path in (*_files(folder), folder / FILE, *(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync(path)


def damage(folder: Path) -> str | None:
    """What is wrong with a sealed folder, such as ``"model.safetensors was changed"``; None if it is whole.

    Files that were added later are not looked at.
    """
    try:
        for name, checksum in sealed_files(folder).items():
            if not (folder / name).resolve().is_relative_to(folder.resolve()):
                return f"{FILE} names {name}, which is outside"
            if not (folder / name).is_file():
                return f"{name} is missing"
            if _checksum(folder / name) != checksum:
                return f"{name} was changed"
    except FileNotFoundError:
        return f"{FILE} is missing"
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        return f"{FILE} cannot be followed: {error}"
    return None


def sealed_files(folder: Path) -> dict[str, str]:
    """Returns the checksum of every file that was sealed, by its name below the folder; raises what damaged JSON raises."""
    files: dict[str, str] = json.loads(read_text(folder / FILE, SETTINGS))
    return files


def remove_sealed(folder: Path) -> None:
    """Remove the files that were sealed, the manifest last, and the folders that are empty then. Other files stay.

    After an interruption it can be called again. Without a manifest that can be followed, only empty folders are removed.
    """
    try:
        names = {*sealed_files(folder), FILE}
    except (OSError, ValueError, TypeError, RecursionError):
        names = set()
    for part in (names - {FILE}, names & {FILE}):
        remove_files(folder, part.__contains__)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / FILE)


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
