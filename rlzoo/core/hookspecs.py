"""The hooks through which plugins extend the zoo, and the version of the plugin interface."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from rlzoo.core.advantages import AdvantageEstimator
    from rlzoo.core.corrections import Correction
    from rlzoo.core.policy import ClipPolicy

PROJECT = "rlzoo"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

API_VERSION = (1, 2)
"""Major and minor version of the plugin interface. Minor versions extend the interface. Major versions may break plugins.

A plugin declares the version it needs with ``RLZOO_API = "1.2"`` in the module that defines its hooks. The
plugin is not loaded if this version of rlzoo does not support that interface version.
"""


@hookspec
def rlzoo_clip_policies() -> Iterable[type[ClipPolicy]]:
    """Return the rules that this plugin adds to the zoo."""
    raise NotImplementedError  # pluggy calls only the implementations


@hookspec
def rlzoo_advantages() -> Iterable[type[AdvantageEstimator]]:
    """Return the advantage estimators that this plugin adds (since interface 1.1)."""
    raise NotImplementedError


@hookspec
def rlzoo_corrections() -> Iterable[type[Correction]]:
    """Return the mismatch corrections that this plugin adds (since interface 1.1)."""
    raise NotImplementedError


@hookspec
def rlzoo_tasks() -> Mapping[str, str]:
    """Return a mapping from ``task.name`` to ``module:Class`` for the tasks that this plugin adds (since interface 1.1).

    A name may end with a placeholder for a setting: ``puzzles:<dataset>`` matches ``puzzles:sudoku`` (``dataset`` is sudoku).
    """
    raise NotImplementedError


def api_problem(wanted: object) -> str | None:
    """Return why a plugin that needs interface version ``wanted`` (such as ``"1.0"``) cannot be used, or None."""
    major, minor = API_VERSION
    try:
        wanted_major, wanted_minor = map(int, str(wanted).split("."))
    except ValueError:
        return f"RLZOO_API = {wanted!r} is not a version such as '{major}.{minor}'"
    if wanted_major == major and wanted_minor <= minor:
        return None
    return f"it needs plugin interface {wanted}, but this version of rlzoo has {major}.{minor}; install matching versions"
