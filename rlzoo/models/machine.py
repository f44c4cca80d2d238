"""The cores and the memory that this process may use, within its CPU affinity and the limits of its container."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path("/")  # contains proc/self/cgroup, which names this process's cgroups, and sys/fs/cgroup with their limits
LAUNCHED = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # variables in which a launcher numbers its processes
LAUNCHER = "RLZOO_LAUNCHER"  # variable with the ID of the process that launched a run, which ends with that process
CPU = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))  # files in cgroup version 2 and in version 1
MEMORY = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


def cores(root: Path = ROOT) -> int:
    """Return the number of whole cores for this process, at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = (quota // period for quota, period, _ in _limits("cpu", CPU, root) if quota > 0)  # -1 means no limit in version 1
    return max(1, min([allowed, *quotas]))


def total_memory(root: Path = ROOT) -> int:
    """Return the memory, in bytes, that this process could use if no other process used any."""
    return min([int(psutil.virtual_memory().total), *(limit for limit, _, _ in _limits("memory", MEMORY, root))])


def available_memory(root: Path = ROOT) -> int:
    """Return the memory, in bytes, that this process could still allocate."""
    free = (limit - used + cache for limit, used, cache in _limits("memory", MEMORY, root))
    return min([int(psutil.virtual_memory().available), *free])


def _limits(controller: str, files: tuple[tuple[str, ...], ...], root: Path) -> Iterator[tuple[int, int, int]]:
    """For each limit on this process's cgroup and its parents, yield its two numbers and the size of the group's file cache."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controllers and controller)  # version 2 has one tree for all controllers
        folder = top / path.strip("/")
        for group in [folder, *folder.parents]:
            text = " ".join(_text(group / file) for file in files[controllers != ""])
            numbers = re.findall(r"-?\d+", text)  # "max" means no limit in version 2
            if len(numbers) == 2 and group.is_relative_to(top):
                caches = re.findall(r"inactive_file (\d+)", _text(group / "memory.stat"))
                yield int(numbers[0]), int(numbers[1]), int([0, *caches][-1])


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.is_file() else ""
