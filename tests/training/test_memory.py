"""The memory of a run does not grow with the number of its steps."""

import ctypes
import sys

import pytest
import torch

import rlzoo
from rlzoo.measure.monitor import WINDOW
from rlzoo.support.atomic import write_tensors
from tests.training.short import lines, quick

TINY = ["rollout.num_prompts=2", "rollout.group_size=2", "rollout.max_new_tokens=4", "eval.num_problems=0"]


@pytest.mark.long
def test_a_run_keeps_recent_metrics_in_memory_and_returns_all(tmp_path):
    rows, references = [], []

    def observe(step, metrics):
        rows.append(metrics)
        references[:] = [sys.getrefcount(row) for row in rows]

    steps = WINDOW + 4
    result = rlzoo.train(quick(tmp_path / "run", steps=steps, overrides=[*TINY, "tracking.mlflow=false"]), observe)
    unused = references[0]  # of a row that only this test still refers to
    assert [count > unused for count in references] == [False] * 5 + [True] * WINDOW
    assert result.metrics == [{"step": step, **row} for step, row in enumerate(rows)]
    assert [row["step"] for row in lines(tmp_path / "run" / "metrics.jsonl")] == list(range(steps + 1))


def test_tensors_of_new_sizes_do_not_leak_types(tmp_path):
    def write(size):
        write_tensors(tmp_path / "file.safetensors", {"x": torch.zeros(size), "y": torch.ones(size) > 0}, "key")

    write(1)
    before = len(ctypes._pointer_type_cache)
    for size in range(1001, 1041):
        write(size)
    assert len(ctypes._pointer_type_cache) == before


def test_tensors_of_every_type_and_layout_are_written_unchanged(tmp_path):
    from safetensors.torch import load_file

    square = torch.arange(6.0).reshape(2, 3)
    for tensors in ({"a": square.T, "b": torch.tensor(3), "c": torch.zeros(0)}, {"d": square.bfloat16()}):
        write_tensors(tmp_path / "file.safetensors", tensors, "key")
        read = load_file(tmp_path / "file.safetensors")
        assert all(read[name].equal(tensor) and read[name].dtype == tensor.dtype for name, tensor in tensors.items())
