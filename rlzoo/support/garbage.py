"""Garbage collector settings of the command line: collections are rare during imports and fast during training.

`rlzoo.train` does not change the collector, which belongs to the user in a notebook or a test.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_WHILE_LOADING = (50_000, 10, 10)
_USUAL = gc.get_threshold()  # Python's default, unless it was changed before this import


def collect_seldom() -> None:
    """Collect after 50,000 new objects instead of hundreds, because most objects created by imports are kept."""
    gc.set_threshold(*_WHILE_LOADING)


@contextmanager
def quick_garbage_collection() -> Iterator[None]:
    """Freeze the objects that exist on entry, about half a million, so that collections in the block are fast.

    The default thresholds are restored, because reference cycles may hold tensors.
    """
    former = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_USUAL)
    try:
        yield
    finally:
        gc.set_threshold(*former)
        gc.unfreeze()
