"""Recorded rollouts that are torn or changed are refused by their file, with what is wrong."""

import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlzoo.errors import UserError
from rlzoo.lab.recorded import RecordedRun

CHANGES = {
    "lengths is missing": lambda tensors: tensors.pop("lengths"),
    "lengths has 48 values and group_ids 47": lambda tensors: tensors.update(group_ids=tensors["group_ids"][:-1].clone()),
    "sequence_lengths holds more than there are tokens": lambda tensors: tensors["sequence_lengths"].fill_(2**62),
    "lengths is not one row of whole numbers from 0": lambda tensors: tensors["lengths"].neg_(),
    "rows/0 names a response that is not there": lambda tensors: tensors["rows/0"].add_(1000),
    "log_probs/1 is missing": lambda tensors: tensors.pop("log_probs/1"),
    "old_log_probs holds a value that is not finite": lambda tensors: tensors["old_log_probs"].fill_(math.nan),
    "advantages has torch.float64 values": lambda tensors: tensors.update(advantages=tensors["advantages"].to(torch.float64)),
}


@pytest.fixture
def run(trained, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(trained.path, folder, ignore=shutil.ignore_patterns("checkpoints", "replay"))
    return folder


@pytest.mark.parametrize("problem", CHANGES)
def test_what_is_wrong_with_a_recording_is_said(run, problem):
    file = run / "rollouts" / "000002.safetensors"
    tensors = load_file(file)
    CHANGES[problem](tensors)
    save_file(tensors, file)
    with pytest.raises(UserError) as refusal:
        RecordedRun.read(run)
    assert f"{str(file)!r} does not hold what a run records: {problem}" in str(refusal.value)


def test_a_torn_recording_and_one_of_no_step_are_refused(run):
    file = run / "rollouts" / "000002.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"000002.safetensors' cannot be read: .*; remove it"):
        RecordedRun.read(run)
    file.write_bytes(whole)
    file.rename(file.with_stem("last"))
    with pytest.raises(UserError, match="is not named after a step"):
        RecordedRun.read(run)


def test_a_run_whose_config_is_spoiled_is_refused_by_its_name(run):
    (run / "config.yaml").write_text("clip: fspo\nlearner: 3\n")
    with pytest.raises(UserError, match=r"/run' has a config.yaml that describes no run: learner=3"):
        RecordedRun.read(run)
