"""How long threads of OpenMP spin before they sleep."""

from __future__ import annotations

import os

SPINS = 1000
"""Turns of libgomp's loop before a thread sleeps: libgomp's own choice where it has more threads than cores.

Where it has as many threads as cores, it waits 300,000 turns, which is milliseconds. Beside other busy processes, a thread then
spins through its share of a core while the thread that it waits for is not running.
"""

SET_BY_USERS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def wait_briefly() -> None:
    """Let OpenMP's threads sleep soon; call it before torch is imported. A setting of the user's is kept."""
    if not any(name in os.environ for name in SET_BY_USERS):
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)
