"""The cores and the memory that this process may use, within its CPU affinity and the limits of its container."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/")  # contains proc/self/cgroup, which names this process's cgroups, and sys/fs/cgroup with their limits
LIMITS = (("memory.max", "memory.current", "inactive_file"),
          ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))  # fmt: skip
"""Files with the limit and the usage, and the key of the file cache in ``memory.stat``, in cgroup versions 2 and 1."""


def cores(root: Path = ROOT) -> int:
    """Return the number of whole cores for this process, at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _groups("cpu", root):
        limits = _text(group / "cpu.max") or _text(group / "cpu.cfs_quota_us") + _text(group / "cpu.cfs_period_us")
        with suppress(ValueError):  # no limit is "max" in version 2 and -1 in version 1
            quota, period = map(int, limits.split())
            allowed = min(allowed, quota // period) if quota > 0 else allowed
    return max(1, allowed)


def total_memory(root: Path = ROOT) -> int:
    """Return the memory that this process could use if nothing else did, in bytes."""
    import psutil

    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _memory(root))])


def available_memory(root: Path = ROOT) -> int:
    """Return the memory that this process could still allocate, in bytes."""
    import psutil

    return max(0, min([int(psutil.virtual_memory().available), *(limit - used for limit, used in _memory(root))]))


def _memory(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit of each cgroup and its usage, without the file cache, which the kernel frees when needed."""
    for group in _groups("memory", root):
        for limit, usage, cache in LIMITS:
            with suppress(ValueError):
                cached = re.search(rf"^{cache} (\d+)", _text(group / "memory.stat"), re.MULTILINE)
                yield int(_text(group / limit)), int(_text(group / usage)) - int(cached[1] if cached else 0)


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and of those around it, each of which may have limits."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(",") or not controllers:  # version 2 has one tree for all controllers
            top = root / "sys/fs/cgroup" / (controllers and controller)
            folder = top / path.strip("/")
            yield from (group for group in (folder, *folder.parents) if group.is_relative_to(top))


def _text(file: Path) -> str:
    with suppress(OSError):
        return file.read_text(encoding="utf-8")
    return ""
