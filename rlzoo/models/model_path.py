"""Which folder ``model.path`` means, without loading anything."""

from __future__ import annotations

import importlib.resources
import os
from pathlib import Path

from rlzoo.errors import UserError, did_you_mean, shown

ALLOWED = "'embedded', 'smollm2', a folder, or a hub name that can be downloaded or is in the cache"


def local_model(path: str) -> Path | None:
    """The folder of a model on this machine; None for ``"smollm2"`` and for the name of a model on the hub.

    Raises:
        UserError: there is no such folder, it holds no model, or the path is no name of a model.
    """
    if path == "embedded":
        return Path(str(importlib.resources.files("rlzoo"))) / "assets" / "embedded"
    if path == "smollm2":
        return None
    try:
        folder = Path(path).expanduser() if path.startswith("~/") else Path(path)
        exists = bool(path) and folder.exists()
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"model.path={shown(path)}: {error}") from error
    if exists:
        return _model_folder(folder, path)
    if path.startswith((".", "/", "~", os.sep)) or path.count(os.sep) > 1 or path.endswith(("/", os.sep)):
        raise UserError(f"model.path={path!r}: no such folder")
    if "/" not in path:
        raise UserError(f"model.path={path!r}: no such model (allowed: {ALLOWED}){did_you_mean(path, ['embedded', 'smollm2'])}")
    return None


def _model_folder(folder: Path, path: str) -> Path:
    if not folder.is_dir():
        raise UserError(f"model.path={path!r}: {folder} is a file, not a folder")
    if not (folder / "config.json").is_file():
        raise UserError(f"model.path={path!r}: {folder} is a folder without config.json: not a model")
    return folder
