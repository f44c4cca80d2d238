"""Connects to an MLflow store that may misbehave: a server that is slow, never stops sending, or is not MLflow's at all."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlzoo.support.replies import bounded_replies

LARGEST_REPLY = 16 * 2**20
"""Bytes of a reply. The history of a metric, the largest reply that is asked for, has about 90 bytes for a step."""

LONGEST_REPLY = 60.0
"""Seconds of a reply."""

SPARE_MEMORY = 2**30
"""Bytes that this process may take beside what it has: a compressed reply grows when it is read, a thousandfold at most."""

_DEFAULTS = {
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",  # a new store logs every table that it makes, and one that fails a traceback
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # MLflow's own retries take minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}


def set_defaults() -> None:
    """Set what MLflow reads from the environment, where the user has not."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)


@contextmanager
def bounded_store() -> Iterator[None]:
    """Bound what a store can take of this process within the block: time and size of its replies, and memory."""
    set_defaults()
    import mlflow  # noqa: F401  (what it takes itself does not count)

    former = resource.getrlimit(resource.RLIMIT_DATA)
    used = _data_bytes()
    if used is not None:
        limit = used + SPARE_MEMORY
        lower = limit if former[0] == resource.RLIM_INFINITY else min(limit, former[0])
        resource.setrlimit(resource.RLIMIT_DATA, (lower, former[1]))
    try:
        with bounded_replies(LARGEST_REPLY, LONGEST_REPLY):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, former)


def _data_bytes() -> int | None:
    """Return what Linux counts against ``RLIMIT_DATA``; None on other systems."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return None
    found = [line for line in status.splitlines() if line.startswith("VmData:")]
    return int(found[0].split()[1]) * 1024 if found else None
