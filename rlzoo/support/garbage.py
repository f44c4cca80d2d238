"""Python's garbage collector, kept from looking again and again at what stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_WHILE_LOADING = (50_000, 10, 10)
_USUAL = gc.get_threshold()  # as it is when this is imported: Python's own, unless somebody has set another


def collect_seldom() -> None:
    """Look for garbage after 50,000 new objects, not after hundreds: those that libraries make while imported stay."""
    gc.set_threshold(*_WHILE_LOADING)


@contextmanager
def quick_garbage_collection() -> Iterator[None]:
    """Within, the collector leaves alone what stands at the beginning, half a million objects, and so takes milliseconds.

    It looks as often as before `collect_seldom`, for what refers to itself may hold tensors.
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
