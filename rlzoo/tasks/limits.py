"""What a grading worker may take: so much memory, and no more."""

from __future__ import annotations

MEMORY = 768 * 2**20
"""Bytes of its own that a grading worker may hold. The libraries take 0.14 GB; an answer that wants more than the
rest, as 9^{9^{9}} does, counts 0."""


def limit_memory(limit: int = MEMORY) -> None:
    """Let this process hold no more than ``limit`` bytes of its own; an allocation beyond raises MemoryError.

    Counted is private memory that can be written, not the code of libraries (Linux's RLIMIT_DATA); elsewhere this may
    be without effect. A limit that is lower already stays.
    """
    try:
        import resource
    except ModuleNotFoundError:  # not a Unix
        return
    given = [value for value in resource.getrlimit(resource.RLIMIT_DATA) if value != resource.RLIM_INFINITY]
    lowest = min(limit, *given) if given else limit
    resource.setrlimit(resource.RLIMIT_DATA, (lowest, lowest))
