"""The load of the machine a run is on: sampled by MLflow's own monitors into a file, and sent from there."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from rlzoo.journal.tracking.record import FOLDER
from rlzoo.journal.tracking.rows import Lines

FILE = "machine.jsonl"
SOON = 1.0  # seconds to the first sample, for short runs


class Machine:
    """Samples in a thread of its own until `end`; not at all if ``every`` is 0.

    MLflow's own thread around the same monitors asks the store before every sample, and ends when it does not answer.
    """

    def __init__(self, directory: Path, every: float) -> None:
        self._file = directory / FOLDER / FILE
        self._every = every
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        if every > 0:
            self._thread.start()

    def end(self) -> None:
        """Take a last sample and stop."""
        self._over.set()
        if self._every > 0:
            self._thread.join(timeout=5)

    def _sample(self) -> None:
        monitors, former = _monitors(), Lines(self._file)
        step = max((int(row["step"]) for row in former.added()), default=-1) + 1
        if self._file.exists():
            os.truncate(self._file, former.offset)  # a line that was not finished
        _measure(monitors)  # the first load is that since the one before
        pause, is_over = min(SOON, self._every), False
        while not is_over:
            is_over, pause = self._over.wait(pause), self._every
            row = {"step": step, "time/clock": time.time(), **_measure(monitors)}
            try:
                with self._file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            except OSError:  # a full disk: the run will say so
                return
            step += 1


def _monitors() -> list[Any]:
    """Processor, memory, disk, network, and NVIDIA's or AMD's GPUs where there are any and the library that asks them."""
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor
    from mlflow.system_metrics.metrics.rocm_monitor import ROCMMonitor

    monitors: list[Any] = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
    for gpus in (GPUMonitor, ROCMMonitor):
        with contextlib.suppress(Exception):  # each vendor's library has errors of its own
            return [*monitors, gpus()]
    return monitors


def _measure(monitors: list[Any]) -> dict[str, float]:
    """One sample, by MLflow's names."""
    found: dict[str, float] = {}
    for monitor in monitors:
        monitor.collect_metrics()
        found |= {f"system/{name}": float(value) for name, value in monitor.aggregate_metrics().items()}
        monitor.clear_metrics()
    return found
