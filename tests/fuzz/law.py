"""The law of bad input, and the number of cases that were checked against it.

Input is accepted, or rejected with a one-line `UserError` that names the input, in less than 5 s and with less than 1 GB.
"""

import gc
import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from rlzoo.core.errors import UserError

MAX_SECONDS = 5.0
MAX_BYTES = 2**30
LONGEST_MESSAGE = 4000  # characters; what fits on a screen
SHARES = {  # of the cases; cheap surfaces get most of them
    "model outputs, read in process": 0.580,
    "data lines": 0.280,
    "config files": 0.040,
    "overrides": 0.040,
    "run directories": 0.020,
    "recorded rollouts": 0.020,
    "evaluation directories": 0.010,
    "model outputs, graded in a worker": 0.010,
}
IN_THE_ORDINARY_SUITE = 400
TOTAL = int(os.environ.get("RLZOO_FUZZ_CASES", IN_THE_ORDINARY_SUITE))
SEED = int(os.environ.get("RLZOO_FUZZ_SEED", "0"))


@dataclass
class Surface:
    """The cases that were tried on one part of rlzoo that reads untrusted files or text."""

    name: str
    cases: int = 0
    refused: int = 0
    worst_seconds: float = 0.0
    tried_again: int = 0  # cases that took too long by the clock the first time
    clock: Callable[[], float] = time.process_time  # CPU time, so that a busy machine does not break the law
    peak_bytes: int = 0  # above the process's memory before; for worker processes, all their memory

    def check(self, act: Callable[[], object], *names: str, parts: int = 1, again: bool = False) -> object:
        """Check one case against the law; returns what ``act`` returned, or None if it was rejected.

        Args:
            act: reads the input.
            names: an error must contain one of these.
            parts: number of inputs that it reads one after the other; each has the time limit.
            again: whether the first try took too long by the clock.
        """
        refusal, taken = None, None
        before = _peak_reset()
        began = self.clock()
        try:
            with _time_limit(), _others_left_alone():
                taken = act()
        except UserError as error:
            refusal = str(error)
        seconds = (self.clock() - began) / parts
        grown = _memory("VmHWM") - before
        if seconds >= MAX_SECONDS and self.clock is time.perf_counter and not again:  # the machine may be busy
            self.tried_again += 1
            return self.check(act, *names, parts=parts, again=True)
        self.cases += 1
        self.refused += refusal is not None
        self.worst_seconds, self.peak_bytes = max(self.worst_seconds, seconds), max(self.peak_bytes, grown)
        assert seconds < MAX_SECONDS, f"{self.name}: {seconds:.1f} s"
        assert grown < MAX_BYTES, f"{self.name}: {grown / 2**20:.0f} MB"
        if refusal is not None:
            assert refusal.isprintable(), f"not one line: {refusal[:500]!r}"
            assert len(refusal) <= LONGEST_MESSAGE, f"{len(refusal)} characters: {refusal[:500]!r}"
            assert any(name in refusal for name in names), f"names none of {names}: {refusal[:500]!r}"
        return taken

    def counts(self) -> dict[str, object]:
        """Return plain JSON."""
        return {key: value for key, value in vars(self).items() if key != "clock"}

    @contextmanager
    def watching_workers(self) -> Iterator[None]:
        """Count the memory of child processes; polled often, because some are killed."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(0.02):
                self.peak_bytes = max([self.peak_bytes, *(_memory("VmHWM", child) for child in _children())])

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()
        assert self.peak_bytes < MAX_BYTES, f"{self.name}: a worker took {self.peak_bytes / 2**20:.0f} MB"


SURFACES = {name: Surface(name) for name in SHARES}
SURFACES["model outputs, graded in a worker"].clock = time.perf_counter  # another process does the computing


def held_to_the_law(
    surface: str, share: float = 1.0, **strategies: object
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a property test with its share of the surface's cases.

    Args:
        surface: a key of `SHARES`.
        share: fraction of the surface's cases.
        strategies: as for `given`.
    """
    number = max(5, round(TOTAL * SHARES[surface] * share))
    chosen = settings(
        max_examples=number,
        deadline=None,  # the law has its own time limit
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
    )
    return lambda test: seed(SEED)(chosen(given(**strategies)(test)))


@contextmanager
def memory_limit() -> Iterator[None]:
    """Limit the process's memory to twice the law's limit, so that a defect fails a test instead of exhausting the machine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_memory("VmData") + 2 * MAX_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def report() -> str:
    """Print one line per surface, and write JSON to the file in ``RLZOO_FUZZ_REPORT`` if it is set."""
    tried = [surface for surface in SURFACES.values() if surface.cases]
    if name := os.environ.get("RLZOO_FUZZ_REPORT"):
        Path(name).write_text(json.dumps([surface.counts() for surface in tried], indent=2) + "\n", encoding="utf-8")
    rows = [
        f"{surface.name}: {surface.cases:,} cases, {surface.refused:,} refused, worst {surface.worst_seconds:.2f} s, "
        f"peak {surface.peak_bytes / 2**20:.0f} MB"
        for surface in tried
    ]
    return "\n".join([*rows, f"{sum(surface.cases for surface in tried):,} cases"])


@contextmanager
def _others_left_alone() -> Iterator[None]:
    """Only collect new objects: visiting all objects that a hundred thousand cases leave would take more than a second."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _time_limit() -> Iterator[None]:
    """Interrupt computations that use too much CPU time; pytest-timeout measures wall time."""

    def stop(signum: int, frame: object) -> None:
        raise AssertionError(f"computes for more than {MAX_SECONDS} s")

    former = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, former)


def _peak_reset() -> int:
    """Reset the process's peak memory; returns the current memory."""
    with suppress(OSError):  # if the kernel does not support it, the peak since the start of the process is used
        Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(what: str, process: str = "self") -> int:
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:  # the process has ended
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(f"{what}:")), 0)


def _children() -> list[str]:
    found = []
    for thread in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # the thread has ended
            found += (thread / "children").read_text().split()
    # until it runs its own command, a child is a copy with our memory
    return [child for child in found if _command(child) != _command("self")]


def _command(process: str) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:  # the process has ended
        return b""
