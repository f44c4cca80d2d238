"""A run on a Ray cluster is copied while it changes; tests/nodes has the tests on a real cluster."""

import os
import sys
from pathlib import Path

import pytest

from rlzoo.lab.on_ray import Runner


@pytest.fixture
def runner(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/true")
    made = Runner({"run/checkpoints/step-000001/model": b"1", "run/metrics.jsonl": b"{}"}, [], {})
    made._process.wait()
    yield made
    made.remove()


def test_a_folder_that_is_removed_while_it_is_listed_is_skipped(runner, monkeypatch):
    gone, scandir = runner.folder / "run" / "checkpoints" / "step-000001", os.scandir
    (runner.folder / "run" / "metrics.jsonl").write_text("{}\n{}")

    def vanishing(path="."):
        if Path(path) == gone:
            raise FileNotFoundError(path)
        return scandir(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", vanishing)
        code, files, removed = runner.poll(True)
    assert code == 0
    assert files.keys() == {"run/metrics.jsonl", "log"}
    assert removed == ["run/checkpoints/step-000001/model"]


def test_files_whose_reply_was_lost_are_sent_again(runner):
    runner.poll(True)
    (runner.folder / "run" / "metrics.jsonl").write_text("{}\n{}")
    (runner.folder / "run" / "checkpoints" / "step-000001" / "model").unlink()
    lost, again, after = (runner.poll(was_received) for was_received in (True, False, True))
    assert lost == again == (0, {"run/metrics.jsonl": b"{}\n{}"}, ["run/checkpoints/step-000001/model"])
    assert after == (0, {}, [])
