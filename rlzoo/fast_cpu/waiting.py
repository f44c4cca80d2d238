"""How the threads of one operation wait for each other: by spinning on a machine of their own, asleep beside other processes.

libgomp's threads spin for milliseconds before they sleep. That is fastest while each has a core of its own. Where other
processes need the cores too, a thread spins through its share of a core while the thread that it waits for is not running,
and a run takes several times as long. libgomp has a second, short wait for processes with more threads than cores. Beside
other processes, this module holds one more thread of libgomp, which sleeps; all of them then wait as in such a process.

How threads wait changes no sum. Their number would, so it stays as it is: a run computes the same bits under any load.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import psutil

SPINS = 300_000
"""Turns before a thread sleeps, as libgomp has it where nothing is set."""

SETTINGS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": str(SPINS)}
"""The usual wait where there are enough cores, none at all where there are not; without them the short wait is 100 turns."""

INTERVAL = 0.25
"""Seconds between two looks at the load."""

OTHERS = 0.25
"""Cores that other processes use at least, where threads have to wait for a core."""


def prepare_waiting() -> None:
    """Set the two waits in the environment, from which libgomp reads them when torch is imported.

    What the user has set is kept. Nothing is set where torch comes with another OpenMP, to which the variables mean
    something else.
    """
    if not any(name in os.environ for name in SETTINGS) and _torch_has_libgomp():
        os.environ.update(SETTINGS)


def _torch_has_libgomp() -> bool:
    spec = find_spec("torch")
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    return any(Path(folder, "lib").glob("libgomp*") for folder in folders)


@contextmanager
def waiting_by_load(threads: int) -> Iterator[None]:
    """Within the block, threads wait for each other asleep as long as other processes need their cores.

    Does nothing where there is no libgomp or no ``/proc``, or a single thread.

    Args:
        threads: of one operation, as `torch.get_num_threads` gives it.
    """
    libraries = _libgomps() if threads > 1 else []
    if not libraries:
        yield
        return
    done = threading.Event()
    watcher = threading.Thread(target=_watch, args=(libraries, threads, done), name="waiting", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _watch(libraries: list[ctypes.CDLL], threads: int, done: threading.Event) -> None:
    """Hold one more thread while others need the cores."""
    more: _MoreThreads | None = None
    before = _clocks()
    while not done.wait(INTERVAL):
        now = _clocks()
        others = (now[1] - before[1]) / (now[0] - before[0])
        is_scarce = others > len(os.sched_getaffinity(0)) - threads + OTHERS
        before = now
        if is_scarce and more is None:
            more = _MoreThreads(libraries)
        elif not is_scarce and more is not None:
            more.release()
            more = None
    if more is not None:
        more.release()


def _clocks() -> tuple[float, float]:
    """Seconds by the clock, and seconds that the cores of this process have worked for other processes so far."""
    ours = os.sched_getaffinity(0)
    cores = [core for number, core in enumerate(psutil.cpu_times(percpu=True)) if number in ours]
    busy = sum(core.user + core.nice + core.system + core.irq + core.softirq + core.steal for core in cores)
    return time.monotonic(), busy - time.process_time()


class _MoreThreads:
    """Of each libgomp one thread more than operations use, asleep until it is released."""

    def __init__(self, libraries: list[ctypes.CDLL]) -> None:
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._hold, args=(libraries,), name="waiting-more", daemon=True)
        self._thread.start()

    def release(self) -> None:
        self._released.set()
        self._thread.join()

    def _hold(self, libraries: list[ctypes.CDLL]) -> None:
        for library in libraries:
            # an operation that does nothing: the second thread that it takes belongs to this thread until this thread ends
            library.GOMP_parallel(library.omp_get_thread_num, None, 2, 0)
        self._released.wait()


def _libgomps() -> list[ctypes.CDLL]:
    """Those that are loaded: several libraries bring their own."""
    try:
        _clocks()
        paths = {mapped.path for mapped in psutil.Process().memory_maps() if "libgomp" in Path(mapped.path).name}
    except (OSError, psutil.Error):
        return []
    return [ctypes.CDLL(path) for path in sorted(paths) if Path(path).is_file()]  # not one that was replaced since
