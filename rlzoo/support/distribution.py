"""The installed distribution of rlzoo, with checks for conflicts with another project that has the same import name."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

from rlzoo.core.discovery import DISTRIBUTION


def version() -> str:
    """Return the installed version."""
    return metadata.version(DISTRIBUTION)


def damage() -> str | None:
    """Return the reason rlzoo cannot work, or None. The other project may have replaced or removed rlzoo's ``__init__.py``."""
    try:
        Path.cwd()
    except FileNotFoundError:  # importing torch would end the program
        return "the current directory was deleted; change to another one"
    package = sys.modules["rlzoo"]
    if "load_zoo" not in getattr(package, "__all__", ()):
        file = Path(package.__path__[0], "__init__.py")
        return f"{file} was replaced or removed by another project, 'rlzoo' on the package index: {_repair()}"
    return None


def _repair() -> str:
    from rlzoo.support.extras import how_to_install  # its imports would delay the start of every command

    return f"pip uninstall rlzoo && {how_to_install(options='--force-reinstall --no-deps ')}"
