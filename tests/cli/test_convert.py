"""`rlzoo convert`: what it writes, and what it leaves unchanged."""

import json
import subprocess
import sys

import pytest

from rlzoo.recording import RecordedStep
from tests.integrations.test_dumps import nemo_rl_row, write_lines


def convert(*arguments):
    command = [sys.executable, "-m", "rlzoo", "convert", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def dumps(tmp_path):
    for number in (1, 2):
        write_lines(tmp_path / "dumps" / f"train_data_step{number}.jsonl", map(nemo_rl_row, range(3)))
    return tmp_path / "dumps"


def test_a_rollout_file_is_written_for_each_step(dumps, tmp_path):
    done = convert(dumps, "--from", "nemo-rl", "--output", tmp_path / "out", "--temperature", 0.5)
    assert (done.returncode, done.stderr) == (0, "")
    assert "converted 2 steps to" in done.stdout
    files = sorted((tmp_path / "out").iterdir())
    assert [file.name for file in files] == ["000001.safetensors", "000002.safetensors"]
    assert [(RecordedStep.load(file).step, RecordedStep.load(file).temperature) for file in files] == [(1, 0.5), (2, 0.5)]


def test_nothing_is_left_of_a_conversion_that_fails(dumps, tmp_path):
    (dumps / "train_data_step2.jsonl").write_text(json.dumps(nemo_rl_row(0))[:50])
    done = convert(dumps, "--from", "nemo-rl", "--output", tmp_path / "out")
    assert done.returncode == 2
    assert "train_data_step2.jsonl" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_something_is_left_alone(dumps, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "000001.safetensors").write_text("mine")
    done = convert(dumps, "--from", "nemo-rl", "--output", tmp_path / "out")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "is not an empty folder" in done.stderr
    assert (tmp_path / "out" / "000001.safetensors").read_text() == "mine"
