"""Makes the threads of an operation spin while they wait for each other if cores are free, and sleep otherwise.

libgomp's threads spin for milliseconds before they sleep, which is fastest while each thread has its own core. If other
processes need the cores too, a thread spins on its core while the thread that it waits for is not running, and a run takes
several times as long. libgomp has a second, shorter spin for processes with more threads than cores. While other processes need
the cores, this module holds one additional, sleeping libgomp thread, so that all threads use the shorter spin.

How threads wait does not change the results. Changing the number of threads would, so the number stays the same, and a run
computes the same bits under any load.
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
"""Number of iterations for which a thread spins before it sleeps; libgomp's default."""

SETTINGS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": str(SPINS)}
"""With enough cores, threads spin as usual. With too few, they do not spin, whereas libgomp's default is 100 iterations."""

INTERVAL = 0.25
"""Seconds between two measurements of the load."""

OTHERS = 0.25
"""Number of cores by which the load of other processes may exceed the free cores before threads have to wait for a core."""


def prepare_waiting() -> None:
    """Configure both ways of waiting through environment variables, which libgomp reads when torch is imported.

    The user's own settings are kept. Nothing is set if torch comes with another OpenMP runtime, which interprets the
    variables differently.
    """
    if not any(name in os.environ for name in SETTINGS) and _torch_has_libgomp():
        os.environ.update(SETTINGS)


def _torch_has_libgomp() -> bool:
    spec = find_spec("torch")
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    return any(Path(folder, "lib").glob("libgomp*") for folder in folders)


@contextmanager
def waiting_by_load(threads: int) -> Iterator[None]:
    """Inside the block, make threads that wait for each other sleep for as long as other processes need their cores.

    Does nothing without libgomp or ``/proc``, or with a single thread.

    Args:
        threads: number of threads of one operation, from `torch.get_num_threads`.
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
    """Hold one additional thread while other processes need the cores."""
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
    """Return the time in seconds, and the seconds that this process's cores have spent on other processes."""
    ours = os.sched_getaffinity(0)
    cores = [core for number, core in enumerate(psutil.cpu_times(percpu=True)) if number in ours]
    busy = sum(core.user + core.nice + core.system + core.irq + core.softirq + core.steal for core in cores)
    return time.monotonic(), busy - time.process_time()


class _MoreThreads:
    """Holds one more thread per copy of libgomp than an operation uses; the thread sleeps until it is released."""

    def __init__(self, libraries: list[ctypes.CDLL]) -> None:
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._hold, args=(libraries,), name="waiting-more", daemon=True)
        self._thread.start()

    def release(self) -> None:
        self._released.set()
        self._thread.join()

    def _hold(self, libraries: list[ctypes.CDLL]) -> None:
        for library in libraries:
            # run an empty operation: its second thread then belongs to this thread until this thread ends
            library.GOMP_parallel(library.omp_get_thread_num, None, 2, 0)
        self._released.wait()


def _libgomps() -> list[ctypes.CDLL]:
    """Return the loaded copies of libgomp; several libraries ship their own."""
    try:
        _clocks()
        paths = {mapped.path for mapped in psutil.Process().memory_maps() if "libgomp" in Path(mapped.path).name}
    except (OSError, psutil.Error):
        return []
    return [
        ctypes.CDLL(path) for path in sorted(paths) if Path(path).is_file()
    ]  # skip a file that was replaced in the meantime
