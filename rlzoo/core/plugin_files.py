"""The files of plugins that the user named by path, and their copies in a run directory."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

RUN = "run.json"  # marks a run directory
SKIPPED = {"__pycache__", "mlruns", "mlflow.db"}
OUTPUTS = (".log", ".md", ".rst", ".html", ".png", ".svg", ".pdf")  # suffixes of files that a plugin writes but does not read


def plugin_files(path: Path) -> dict[str, Path]:
    """Return the files of a plugin, keyed and sorted by relative path.

    For a package, these are all files except hidden ones, caches, MLflow stores and run directories. For any other folder,
    these are its ``.py`` files.
    """
    if not path.is_dir():
        return {path.name: path}
    files = path.rglob("*") if (path / "__init__.py").is_file() else path.glob("*.py")
    return {file.relative_to(path).as_posix(): file for file in sorted(files) if file.is_file() and _belongs(file, path)}


def _belongs(file: Path, folder: Path) -> bool:
    below = file.relative_to(folder)
    is_skipped = any(name in SKIPPED or name.startswith(".") for name in below.parts)
    return not is_skipped and not any((folder / parent / RUN).exists() for parent in below.parents[:-1])


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
    """Copy each plugin into a folder, creating the folder if needed.

    Raises:
        OSError: a file cannot be read, or a copy cannot be written.
    """
    for path, name in copy_names(paths).items():
        for place, file in plugin_files(path).items():
            copy = folder / name / place if path.is_dir() else folder / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, copy)


def plugins_of_run(run: Path, paths: Sequence[str], *, use_changed: bool) -> list[str]:
    """Return the paths to load a run's plugins from: the original paths, or those of the copies in the run directory.

    A copy is loaded if the original is missing, or if the original has changed and ``use_changed`` is False.
    """
    places: list[str] = []
    for path, name in copy_names(paths).items():
        copy = run / "plugins" / name
        uses_original = not copy.exists() or (path.exists() and (use_changed or _content(path) == _content(copy)))
        places.append(str(path if uses_original else copy))
    return places


def _content(path: Path) -> dict[str, bytes]:
    files = {name: file for name, file in plugin_files(path).items() if file.suffix not in OUTPUTS}
    return {name if path.is_dir() else "": file.read_bytes() for name, file in files.items()}
