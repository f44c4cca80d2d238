"""Runs the children of a sweep as processes, as many at once as the machine has room for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from rlzoo.journal.tracking.record import PARENT_RUN
from rlzoo.lab.sweep import Child

LAUNCHER = "RLZOO_LAUNCHER"
"""Environment variable with the process that has started this one, if that was a sweep or our launcher."""

POLL = 0.5  # seconds between looks at the children
SETTLED = 20.0  # seconds after which a child holds about the memory it is going to
SPARE = 1.2  # free memory wanted for another child, in units of the largest so far


@dataclass(slots=True)
class SweepProcess:
    """A child that is running.

    Example:
        ``worker.process.poll()`` is None until it ends.
    """

    child: Child
    slot: int
    process: subprocess.Popen[bytes]
    started: float

    def memory(self) -> int:
        """Its resident memory in bytes."""
        try:
            return int(psutil.Process(self.process.pid).memory_info().rss)
        except psutil.Error:
            return 0


def run_children(
    children: Sequence[Child],
    jobs: int | None,
    parent_run: str | None,
    look: Callable[[Sequence[SweepProcess]], None],
    ended: Callable[[Child, int], None],
) -> list[Child]:
    """Run every child that is not finished, and wait for all.

    Args:
        children: in the order in which to start them.
        jobs: how many at once; None for one per GPU, or without any one per core while memory lasts.
        parent_run: the MLflow run they belong to.
        look: called every half second with the running ones.
        ended: told each child that ended, and its exit code.

    Returns:
        Those that failed. On Ctrl-C or SIGTERM the running ones are told to save and end, and the exception goes on.
    """
    waiting = [child for child in children if not child.is_finished]
    environments = slots(jobs)
    running: list[SweepProcess] = []
    failed: list[Child] = []
    largest = 0  # memory of a child that has settled, in bytes; 0 until one has
    try:
        while waiting or running:
            free = [slot for slot in range(len(environments)) if slot not in {worker.slot for worker in running}]
            if waiting and free and (jobs is not None or _has_room(running, largest)):
                running.append(start(waiting.pop(0), free[0], environments[free[0]], parent_run))
                continue
            look(running)
            time.sleep(POLL)
            settled = [worker for worker in running if time.monotonic() - worker.started > SETTLED]
            largest = max([largest, *(worker.memory() for worker in settled)])
            for worker in [worker for worker in running if worker.process.poll() is not None]:
                running.remove(worker)
                failed += [] if worker.child.is_finished else [worker.child]
                ended(worker.child, int(worker.process.returncode))
    finally:
        for worker in running:
            worker.process.send_signal(signal.SIGTERM)
        for worker in running:
            worker.process.wait()
    return failed


def slots(jobs: int | None) -> list[dict[str, str]]:
    """The environment of each place a child can run in: a GPU of its own, or a share of the cores."""
    import torch

    gpus = torch.cuda.device_count()
    cores = len(os.sched_getaffinity(0))
    number = jobs or gpus or cores
    threads = {"OMP_NUM_THREADS": str(max(1, cores // number))}
    if not gpus:
        return [threads] * number
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = shown if len(shown) == gpus else [str(index) for index in range(gpus)]
    return [threads | {"CUDA_VISIBLE_DEVICES": names[index % gpus]} for index in range(number)]


def start(child: Child, slot: int, environment: dict[str, str], parent_run: str | None) -> SweepProcess:
    """Start a child, or go on with one that was broken off; its output is in ``logs/``."""
    log = child.path.parent / "logs" / f"{child.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    variables = os.environ | environment | {LAUNCHER: str(os.getpid())} | ({PARENT_RUN: parent_run} if parent_run else {})
    command = [sys.executable, "-P", "-m", "rlzoo", "train", *child.arguments, *(["--resume"] if child.is_begun else [])]
    with log.open("ab") as file:
        # a session of its own: Ctrl-C reaches us alone, and we tell the children once
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=variables, start_new_session=True
        )
    return SweepProcess(child, slot, process, time.monotonic())


def _has_room(running: Sequence[SweepProcess], largest: int) -> bool:
    """Whether another child fits into memory, if it and the running ones all grow as large as the largest so far."""
    missing = sum(max(0, largest - worker.memory()) for worker in running)
    return not running or 0 < SPARE * largest < psutil.virtual_memory().available - missing
