"""How long threads of OpenMP spin before they sleep."""

from __future__ import annotations

import os

SPINS = 2000
"""Turns of libgomp's loop, some tens of microseconds: longer than the gap between two operations of a large model.

libgomp's own 300,000 turns are milliseconds. Beside other busy processes, a thread then spins through its share of the core
while the thread it waits for is not running.
"""

SET_BY_USERS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def wait_briefly() -> None:
    """Let OpenMP's threads sleep soon; call it before torch is imported. A setting of the user's is kept."""
    if not any(name in os.environ for name in SET_BY_USERS):
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)
