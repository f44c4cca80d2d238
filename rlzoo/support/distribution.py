"""The distribution that holds rlzoo: its name, its version, and whether another project's files are in its folder."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "rlzoo-llm"
"""Name on the package index, where `rlzoo` is another project that installs an import package `rlzoo` into the same folder."""

REPAIR = f"pip uninstall rlzoo && pip install --force-reinstall --no-deps {DISTRIBUTION}"


def version() -> str:
    """Return the installed version."""
    return metadata.version(DISTRIBUTION)


def damage() -> str | None:
    """Return why rlzoo cannot work, or None: its ``__init__.py`` was replaced by the other project's, or removed with it."""
    package = sys.modules["rlzoo"]
    if "load_zoo" in getattr(package, "__all__", ()):
        return None
    file = Path(package.__path__[0], "__init__.py")
    return f"{file} was replaced or removed by another project, the 'rlzoo' of the package index: {REPAIR}"


def leftovers() -> str | None:
    """Return where the other project's files are beside rlzoo's own, or None; uninstalling that project would damage rlzoo."""
    for folder in sys.modules["rlzoo"].__path__:
        if Path(folder, "algorithms", "__init__.py").is_file():
            return f"{folder} also has files of another project, the 'rlzoo' of the package index: {REPAIR}"
    return None
