"""The load of the machine is sampled during a run, kept in its directory, and never disturbs the run."""

import json
import sys
import time

import pytest

from rlzoo.journal.tracking.machine import Machine, _monitors

NAMES = {"system/cpu_utilization_percentage", "system/system_memory_usage_percentage", "system/disk_usage_percentage"}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tracking").mkdir()
    return tmp_path


def samples(folder):
    return [json.loads(line) for line in (folder / "tracking" / "machine.jsonl").read_text().splitlines()]


def test_samples_come_while_a_run_goes_on_and_at_its_end(folder):
    machine = Machine(folder, every=0.05)
    time.sleep(0.5)
    machine.end()
    rows = samples(folder)
    assert len(rows) >= 3
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert all(row.keys() >= NAMES for row in rows)
    assert all(0 <= row["system/cpu_utilization_percentage"] <= 100 for row in rows)
    time.sleep(0.2)
    assert len(samples(folder)) == len(rows), "none after the end"


def test_a_run_shorter_than_the_interval_has_a_sample(folder):
    machine = Machine(folder, every=3600.0)
    machine.end()
    assert len(samples(folder)) == 1


def test_a_run_that_goes_on_counts_on_behind_whole_samples(folder):
    file = folder / "tracking" / "machine.jsonl"
    for content, expected in (('{"step": 6}\n{"step": 7}\n{"st', [6, 7, 8]), ('{"st', [0])):  # cut off when the run was killed
        file.write_text(content)
        Machine(folder, every=3600.0).end()
        assert [row["step"] for row in samples(folder)] == expected


def test_switched_off_nothing_is_sampled(folder):
    Machine(folder, every=0.0).end()
    assert not (folder / "tracking" / "machine.jsonl").exists()


@pytest.mark.parametrize("library", ["missing", "broken"])
def test_without_a_library_for_gpus_the_rest_is_sampled(monkeypatch, library):
    class Broken:
        def __getattr__(self, name):
            raise OSError("no driver")

    monkeypatch.setitem(sys.modules, "pynvml", None if library == "missing" else Broken())
    assert {type(monitor).__name__ for monitor in _monitors()} >= {"CPUMonitor", "DiskMonitor", "NetworkMonitor"}
