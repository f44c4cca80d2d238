"""Checksums of the files in a folder, to detect damaged or changed checkpoints."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from rlzoo.core.errors import UserError
from rlzoo.models.pretrained import local_model
from rlzoo.support.atomic import remove_files, sync
from rlzoo.support.reading import SETTINGS, read_text, remedy

FILE = "manifest.json"


def seal(folder: Path, is_own: Callable[[str], bool] = lambda name: True) -> None:
    """Write the SHA-256 of each file to ``manifest.json``, and flush the whole folder to disk.

    Args:
        folder: the complete folder.
        is_own: decides whether to seal a file, given its path relative to the folder. Other files remain unsealed.
    """
    names = {str(path.relative_to(folder)): path for path in _files(folder)}
    files = {name: _checksum(path) for name, path in names.items() if is_own(name)}
    (folder / FILE).write_text(json.dumps(files, indent=2) + "\n", encoding="utf-8")
    for path in (*_files(folder), folder / FILE, *(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync(path)


def check_model(path: str) -> None:
    """Raise `UserError` if the model is a checkpoint whose weights, config or tokenizer have changed since it was saved."""
    folder = local_model(path)
    if folder is None or not (folder / "clip.json").is_file() or not (folder / FILE).is_file():
        return  # not a checkpoint
    if what := damage(folder, lambda name: "/" not in name and name != "clip.json"):
        advice = f"restore it, or remove {FILE} to use the folder as it is"
        raise UserError(f"checkpoint {str(folder)!r} is not as the run saved it: {what}; {advice}")


def damage(folder: Path, is_checked: Callable[[str], bool] = lambda name: True) -> str | None:
    """Return a description of the damage to a sealed folder, such as ``"model.safetensors was changed"``; None if it is intact.

    Files that were added later are not checked; ``is_checked`` selects among the others by relative path.

    Raises:
        UserError: a file must not be read, so that nothing is known about its content.
    """
    try:
        files = {name: value for name, value in sealed_files(folder).items() if is_checked(name)}
        for name, checksum in files.items():
            if not (folder / name).resolve().is_relative_to(folder.resolve()):
                return f"{FILE} names {name}, which is outside the folder"
            if not (folder / name).is_file():
                return f"{name} is missing"
            if _checksum(folder / name) != checksum:
                return f"{name} was changed"
    except FileNotFoundError:
        return f"{FILE} is missing"
    except PermissionError as error:
        raise UserError(f"{str(error.filename)!r} cannot be read: {error.strerror}; {remedy(error, '')}") from error
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        return f"{FILE} is not valid: {error}"
    return None


def sealed_files(folder: Path) -> dict[str, str]:
    """Read the checksums of the sealed files, keyed by relative path; raise the parser's error if the manifest is damaged."""
    files: dict[str, str] = json.loads(read_text(folder / FILE, SETTINGS))
    return files


def remove_sealed(folder: Path) -> None:
    """Remove the sealed files, then the manifest and empty folders. Other files are kept.

    The function can be called again after an interruption. Without a valid manifest, only empty folders are removed.
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
