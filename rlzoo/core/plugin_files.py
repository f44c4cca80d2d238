"""Lists, hashes and copies the files of a plugin that the user named by path."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlzoo.core.errors import UserError

LARGEST = 20 * 2**20
"""Maximum total size of a plugin's files in bytes: each run keeps a copy of them."""
MOST = 2000
"""Maximum number of files in a plugin."""

NO_PART_OF_IT = {"__pycache__", "node_modules", "build", "dist", "mlruns", "mlartifacts", "mlflow.db"}
NO_CODE = (".md", ".rst", ".html", ".png", ".svg", ".pdf", ".log")
RUN = "run.json"  # marks a run directory


def plugin_files(path: Path) -> dict[str, Path]:
    """Return the files of a plugin, keyed and sorted by relative path.

    Hidden files, caches, virtual environments, build outputs, MLflow stores and run directories are skipped.

    Args:
        path: a file or a folder.

    Raises:
        UserError: there are too many files, they are too large, or they cannot be read.
    """
    if not path.is_dir():
        return {path.name: path}
    files: dict[str, Path] = {}
    size = 0
    try:
        for file in _files_below(path):
            files[file.relative_to(path).as_posix()] = file
            size += file.stat().st_size
            if size > LARGEST or len(files) > MOST:
                raise UserError(
                    f"plugin {str(path)!r}: the folder exceeds {LARGEST >> 20} MiB or {MOST:,} files, and each run keeps "
                    "a copy; specify the plugin's .py file or package instead, or move other files out of the folder"
                )
    except OSError as error:
        raise UserError(f"plugin {str(path)!r} cannot be read: {error}") from error
    return dict(sorted(files.items()))


def _files_below(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in NO_PART_OF_IT or path.suffix in (".pyc", ".egg-info"):
            continue
        if path.is_file():
            yield path
        elif path.is_dir() and not any((path / mark).exists() for mark in ("pyvenv.cfg", RUN)):
            yield from _files_below(path)


def code_files(path: Path) -> dict[str, Path]:
    """Return the files of a plugin, except documentation and outputs: its code and the data that the code may read."""
    return {name: file for name, file in plugin_files(path).items() if not path.is_dir() or file.suffix not in NO_CODE}


def digest(path: Path) -> str:
    """Hash the `code_files` of a plugin.

    Raises:
        UserError: the plugin cannot be read.
    """
    hasher = hashlib.sha256()
    try:
        for name, file in code_files(path).items():
            content = file.read_bytes()
            hasher.update(f"{name}\n{hashlib.sha256(content).hexdigest()}\n".encode() if path.is_dir() else content)
    except OSError as error:
        raise UserError(f"plugin {str(path)!r} cannot be read: {error}") from error
    return hasher.hexdigest()


def copy_names(paths: Sequence[str | Path]) -> dict[Path, str]:
    """Return the name of each plugin's copy in a run directory: the plugin's name, with a number if it is not unique."""
    names: dict[Path, str] = {}
    for path in map(Path, paths):
        name, number = path.name, 2
        while name in names.values():
            name, number = f"{path.stem}-{number}{path.suffix}", number + 1
        names[path] = name
    return names


def copy_plugins(paths: Sequence[str | Path], folder: Path) -> None:
    """Copy each plugin into a folder, which is created if needed.

    Raises:
        UserError: a plugin is too large.
        OSError: a copy cannot be written.
    """
    for path, name in copy_names(paths).items():
        for place, file in plugin_files(path).items():
            copy = folder / name / place if path.is_dir() else folder / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, copy)


def is_copy(path: Path) -> bool:
    """Return whether a path is the copy of a plugin in a run directory."""
    return path.parent.name == "plugins" and (path.parent.parent / RUN).is_file()
