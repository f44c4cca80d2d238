"""Connects to an MLflow store that may misbehave: a server that is slow, never stops sending, or is not MLflow's at all."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

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


@contextmanager
def bounded_store() -> Iterator[None]:
    """Bound what a store can take of this process within the block: time and size of its replies, and memory."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    import mlflow  # noqa: F401  (what it takes itself does not count)

    former, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = psutil.Process().memory_info().data + SPARE_MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (limit if former == resource.RLIM_INFINITY else min(limit, former), most))
    try:
        with bounded_replies(LARGEST_REPLY, LONGEST_REPLY):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (former, most))
