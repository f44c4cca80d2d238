"""The hook: what a plugin may add to the zoo."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from rlzoo.policy import ClipPolicy

PROJECT = "rlzoo"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def rlzoo_clip_policies() -> Iterable[type[ClipPolicy]]:
    """Return the clip policies this plugin adds to the zoo."""
    raise NotImplementedError  # pluggy calls the implementations, never this
