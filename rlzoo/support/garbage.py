"""How the command line runs Python's garbage collector: seldom while libraries load, and quickly while a run trains.

`rlzoo.train` does not touch the collector: in a notebook or a test, it is the user's.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_WHILE_LOADING = (50_000, 10, 10)
_USUAL = gc.get_threshold()  # Python's own, unless somebody has set another before this module is imported


def collect_seldom() -> None:
    """Collect after 50,000 new objects instead of hundreds: libraries keep most of what they make while imported."""
    gc.set_threshold(*_WHILE_LOADING)


@contextmanager
def quick_garbage_collection() -> Iterator[None]:
    """Within the block, leave out the half a million objects that exist at its start, so that a collection is quick.

    The thresholds are Python's own again, since objects that refer to themselves may hold tensors.
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
