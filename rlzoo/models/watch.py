"""Watches the ranks of a run on several machines, so that no rank waits forever for one that has failed or been lost."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, ClassVar

from rlzoo.core.errors import RunError, one_line

BEAT = 2.0  # seconds between reports that a rank is alive
PATIENCE = 40.0  # seconds without a report after which a rank counts as lost
GRACE = 8.0  # seconds that a rank has to end by itself after another rank has failed


class Watch(threading.Thread):
    """Reports to the other ranks that this rank is alive, and ends this process if another rank is lost or has failed.

    A thread is used instead of a time limit on collective operations, because a rank may sample for minutes while the others
    wait. All ranks report to the store that torch's launcher has opened at ``MASTER_ADDR``. A rank that has not started yet
    does not count as lost.
    """

    active: ClassVar[bool] = False
    number: ClassVar[int] = 0  # number of watches that this process has started, which is the same on every rank

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(name="watch", daemon=True)
        self.rank, self.size = rank, size
        self.over = threading.Event()
        self.failure: str | None = None  # why this rank failed
        Watch.number += 1
        self._prefix = f"rlzoo/{Watch.number}"

    def run(self) -> None:
        """Send reports and read those of the other ranks until the run is over on this rank."""
        address, seen = os.environ["MASTER_ADDR"], dict[int, tuple[str, float]]()
        try:
            store = _store(address)
            while not self.over.wait(0.0 if not seen else BEAT):
                # requests to the store have no time limit of their own
                limit = threading.Timer(PATIENCE, self._end, [f"rank 0 (at {address}) has been unreachable for {PATIENCE:g} s"])
                limit.daemon = True
                limit.start()
                self._report(store, "lives")
                self._look(store, seen)
                limit.cancel()
            self._report(store, "ended" if self.failure is None else "failed")
        except Exception as error:
            if not self.over.is_set():
                self._end(f"rank 0 (at {address}) cannot be reached: {one_line(str(error))}")

    def _report(self, store: Any, state: str) -> None:
        sign = {"host": socket.gethostname(), "state": state, "time": time.monotonic(), "why": self.failure}
        store.set(f"{self._prefix}/{self.rank}", json.dumps(sign))

    def _look(self, store: Any, seen: dict[int, tuple[str, float]]) -> None:
        """Read the reports of the other ranks. ``seen`` holds each rank's last report and when it first appeared."""
        seen[self.rank] = ("", 0.0)
        for rank in range(self.size):
            key = f"{self._prefix}/{rank}"
            if rank == self.rank or not store.check([key]):
                continue
            sign, now = store.get(key).decode(), time.monotonic()
            facts = json.loads(sign)
            if seen.get(rank, ("", 0.0))[0] != sign:
                seen[rank] = (sign, now)
            where = f"rank {rank} (on {facts['host']})"
            if facts["state"] == "failed" and not self.over.wait(GRACE):
                self._end(f"{where} failed: {facts['why']}")
            if facts["state"] == "lives" and now - seen[rank][1] > PATIENCE:
                self._end(f"{where} was lost: no sign of life for {PATIENCE:g} s")

    def _end(self, why: str) -> None:
        with suppress(Exception):
            print(f"\nrlzoo: {why}; this rank ends too; resume the run when all ranks can start", file=sys.stderr, flush=True)
        os._exit(1)


def _store(address: str) -> Any:
    """Connect to the launcher's store, or open a store if this is rank 0 and the launcher has not opened one."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not export it to type checkers

    is_open = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return TCPStore(
        address,
        int(os.environ["MASTER_PORT"]),
        is_master=os.environ["RANK"] == "0" and not is_open,
        timeout=timedelta(minutes=30),  # time for the other machine to start
        wait_for_workers=False,
        multi_tenant=True,
    )


@contextmanager
def watched_ranks() -> Iterator[None]:
    """Watch the other ranks inside the block if a launcher has started ranks on several machines.

    Raises:
        RunError: the connection to another rank broke.
    """
    rank, size, local = (os.environ.get(name, "1") for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    is_launch = {"MASTER_ADDR", "MASTER_PORT", "RANK"} <= os.environ.keys() and f"{rank}{size}{local}".isdecimal()
    if Watch.active or not is_launch or int(local) >= int(size):
        yield
        return
    watch = Watch(int(rank), int(size))
    watch.start()
    Watch.active = True
    try:
        yield
    except Exception as error:
        if isinstance(error, RuntimeError) and re.search("peer|gloo|NCCL", str(error)) and not isinstance(error, RunError):
            watch.join(PATIENCE + 3 * BEAT)  # the watch names the rank that was lost
            error = RunError(f"the connection to another rank broke: {one_line(str(error))}")
        watch.failure = one_line(str(error))
        raise error
    except BaseException as error:
        watch.failure = None if getattr(error, "is_saved", False) else "it was stopped at once"
        raise
    finally:
        Watch.active = False
        watch.over.set()
        watch.join(PATIENCE)
