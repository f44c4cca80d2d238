"""Cores and memory within the limits of containers, read from trees of cgroup files in a temporary folder."""

import os

import psutil
import pytest

from rlzoo.models.machine import available_memory, cores, total_memory

MB = 2**20


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write files below the root, and return the root; the machine has 32 cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(32)))

    def write(groups, files):
        (tmp_path / "proc/self").mkdir(parents=True, exist_ok=True)
        (tmp_path / "proc/self/cgroup").write_text(f"{groups}\n")
        for name, text in files.items():
            file = tmp_path / "sys/fs/cgroup" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")
        return tmp_path

    return write


def test_without_limits_all_memory_is_available(write, tmp_path):
    assert (cores(tmp_path), total_memory(tmp_path)) == (32, psutil.virtual_memory().total)  # no cgroups at all
    free = write("0::/", {"cpu.max": "max 100000", "memory.max": "max", "memory.current": str(5 * MB)})
    assert (cores(free), total_memory(free)) == (32, psutil.virtual_memory().total)
    unlimited = {"memory/memory.limit_in_bytes": str(2**63 - 4096), "memory/memory.usage_in_bytes": "1"}
    free = write("4:memory:/\n1:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000", **unlimited})
    assert (cores(free), total_memory(free)) == (32, psutil.virtual_memory().total)


def test_version_2_applies_the_tightest_limit_of_nested_groups(write):
    files = {
        "pods.slice/cpu.max": "350000 100000",  # 3.5 cores
        "pods.slice/one/cpu.max": "max 100000",
        "pods.slice/memory.max": str(64 * MB),
        "pods.slice/memory.current": str(60 * MB),
        "pods.slice/memory.stat": f"anon 7\ninactive_file {10 * MB}\nactive_file 3",
        "pods.slice/one/memory.max": str(40 * MB),
        "pods.slice/one/memory.current": str(9 * MB),
    }
    root = write("0::/pods.slice/one", files)
    assert cores(root) == 3
    assert total_memory(root) == 40 * MB
    assert available_memory(root) == 14 * MB  # 64 - (60 - 10) in the outer group, 31 in the inner one


def test_version_1_in_a_container_that_sees_only_its_own_group(write):
    files = {
        "cpu/cpu.cfs_quota_us": "50000",
        "cpu/cpu.cfs_period_us": "100000",
        "memory/memory.limit_in_bytes": str(30 * MB),
        "memory/memory.usage_in_bytes": str(25 * MB),
        "memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {20 * MB}",
    }
    root = write("5:memory:/docker/0a1b\n3:cpuacct,cpu:/docker/0a1b\n1:name=systemd:/docker/0a1b", files)
    assert cores(root) == 1  # half a core
    assert (total_memory(root), available_memory(root)) == (30 * MB, 25 * MB)
