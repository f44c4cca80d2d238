"""Checksums of the files in a folder, which reveal damaged or changed checkpoints."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from pydantic import TypeAdapter

from rlzoo.core.errors import UserError
from rlzoo.models.pretrained import local_model
from rlzoo.support.atomic import remove_files, sync
from rlzoo.support.reading import remedy

FILE = "manifest.json"


def seal(folder: Path) -> None:
    """Write the SHA-256 hash of each file in a complete folder to ``manifest.json`` and flush the whole folder to disk."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / FILE)
    checksums = {path.relative_to(folder).as_posix(): _checksum(path) for path in files}
    (folder / FILE).write_text(json.dumps(checksums, indent=2) + "\n", encoding="utf-8")
    for path in (*folder.rglob("*"), folder):
        sync(path)


def check_model(path: str) -> None:
    """Raise `UserError` if the model is a checkpoint whose weights, config or tokenizer have changed since it was saved."""
    folder = local_model(path)
    if folder is None or not (folder / "clip.json").is_file() or not (folder / FILE).is_file():
        return  # not a checkpoint
    if what := damage(folder, lambda name: "/" not in name and name != "clip.json"):
        advice = f"restore it, or remove {FILE} to use the folder as it is"
        raise UserError(f"checkpoint {str(folder)!r} differs from what the run saved: {what}; {advice}")


def damage(folder: Path, is_checked: Callable[[str], bool] = lambda name: True) -> str | None:
    """Describe the damage to a sealed folder, such as ``"model.safetensors was changed"``, or return None if it is intact.

    Files that were added later are not checked. ``is_checked`` selects, by relative path, the sealed files to check.

    Raises:
        UserError: there is no permission to read a file, so its content is unknown.
    """
    try:
        for name, checksum in sealed_files(folder).items():
            if not is_checked(name):
                continue
            if not (folder / name).is_file():
                return f"{name} is missing"
            if _checksum(folder / name) != checksum:
                return f"{name} was changed"
    except FileNotFoundError:
        return f"{FILE} is missing"
    except PermissionError as error:
        raise UserError(f"{str(error.filename)!r} cannot be read: {error.strerror}; {remedy(error, '')}") from error
    except (OSError, ValueError) as error:
        return f"{FILE} is not valid: {error}"
    return None


def sealed_files(folder: Path) -> dict[str, str]:
    """Read the checksums of the sealed files, keyed by relative path.

    Raises:
        OSError: there is no manifest.
        ValueError: the manifest is damaged.
    """
    return TypeAdapter(dict[str, str]).validate_json((folder / FILE).read_bytes())


def remove_sealed(folder: Path) -> None:
    """Remove the sealed files, then the manifest, then empty folders. Other files are kept.

    The function can be called again after an interruption. Without a valid manifest, only empty folders are removed.
    """
    try:
        names = sealed_files(folder)
    except (OSError, ValueError):
        names = {}
    remove_files(folder, names.__contains__)
    remove_files(folder, lambda name: bool(names) and name == FILE)


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
