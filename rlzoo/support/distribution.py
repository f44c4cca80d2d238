"""The distribution that holds rlzoo: its name on the package index, and its version."""

from __future__ import annotations

from importlib import metadata

DISTRIBUTION = "rlzoo-llm"
"""Name on the package index. The index has another project's `rlzoo`, which installs an import package of that name too."""


def version() -> str:
    """The installed version."""
    return metadata.version(DISTRIBUTION)
