"""Samples the load of the machine with MLflow's monitors, and writes it to a file in the run directory."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from rlzoo.journal.tracking.rows import Lines
from rlzoo.journal.tracking.uploads import FOLDER

FILE = "machine.jsonl"
SOON = 1.0  # seconds until the first sample, so that even short runs have a sample


class Machine:
    """Samples the load in a thread until `end` is called; ``every=0`` disables sampling.

    MLflow's own sampling thread is not used: it queries the store before every sample, and stops if the store is down.
    """

    def __init__(self, directory: Path, every: float) -> None:
        self._file = directory / FOLDER / FILE
        self._every = every
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        if every > 0:
            self._thread.start()

    def end(self) -> None:
        """Take a final sample and stop."""
        self._over.set()
        if self._every > 0:
            self._thread.join(timeout=5)

    def _sample(self) -> None:
        monitors, former = _monitors(), Lines(self._file)
        step = max((int(row["step"]) for row in former.added()), default=-1) + 1
        if self._file.exists():
            os.truncate(self._file, former.offset)  # drop an incomplete line
        _measure(monitors)  # each call measures the load since the previous call
        pause, is_over = min(SOON, self._every), False
        while not is_over:
            is_over, pause = self._over.wait(pause), self._every
            row = {"step": step, "time/clock": time.time(), **_measure(monitors)}
            try:
                with self._file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            except OSError:  # the run itself reports a full disk
                return
            step += 1


def _monitors() -> list[Any]:
    """Return monitors for CPU, memory, disk and network, and for NVIDIA or AMD GPUs if their library is installed."""
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor
    from mlflow.system_metrics.metrics.rocm_monitor import ROCMMonitor

    monitors: list[Any] = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
    for gpus in (GPUMonitor, ROCMMonitor):
        with contextlib.suppress(Exception):  # each vendor's library raises different errors
            return [*monitors, gpus()]
    return monitors


def _measure(monitors: list[Any]) -> dict[str, float]:
    """Take one sample, and return it keyed by MLflow's metric names."""
    sample: dict[str, float] = {}
    for monitor in monitors:
        monitor.collect_metrics()
        sample |= {f"system/{name}": float(value) for name, value in monitor.aggregate_metrics().items()}
        monitor.clear_metrics()
    return sample
