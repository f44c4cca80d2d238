"""The hooks: what a plugin may add to the zoo, and the version of the interface it is written against."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from rlzoo.advantages import AdvantageEstimator
    from rlzoo.corrections import Correction
    from rlzoo.policy import ClipPolicy

PROJECT = "rlzoo"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

API_VERSION = (1, 1)
"""Major and minor version of the plugin interface: a minor one adds, a major one changes what a plugin relied on.

A plugin says what it needs with ``RLZOO_API = "1.1"`` beside its hook, and is left out where that is not to be had.
"""


@hookspec
def rlzoo_clip_policies() -> Iterable[type[ClipPolicy]]:
    """Return the clip policies this plugin adds to the zoo."""
    raise NotImplementedError  # pluggy calls the implementations, never this


@hookspec
def rlzoo_advantages() -> Iterable[type[AdvantageEstimator]]:
    """Return the advantage estimators this plugin adds; since interface 1.1."""
    raise NotImplementedError


@hookspec
def rlzoo_corrections() -> Iterable[type[Correction]]:
    """Return the mismatch corrections this plugin adds; since interface 1.1."""
    raise NotImplementedError


@hookspec
def rlzoo_tasks() -> Mapping[str, str]:
    """Return the tasks this plugin adds, ``module:Class`` by the name that ``task.name`` takes; since interface 1.1."""
    raise NotImplementedError


def api_problem(wanted: object) -> str | None:
    """Why a plugin that asks for this interface version cannot be used, or None; ``"1.0"`` is the form."""
    major, minor = API_VERSION
    try:
        wanted_major, wanted_minor = map(int, str(wanted).split("."))
    except ValueError:
        return f"RLZOO_API = {wanted!r} is not of the form '{major}.{minor}'"
    if wanted_major == major and wanted_minor <= minor:
        return None
    return f"it needs plugin interface {wanted}, this rlzoo has {major}.{minor}: install a matching version of either"
