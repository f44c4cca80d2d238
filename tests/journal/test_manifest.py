"""A damaged folder is detected."""

import json
import logging

import pytest

import rlzoo
from rlzoo import UserError
from rlzoo.journal.manifest import damage, seal
from tests.support.test_reading import without_rights
from tests.training.short import without_times
from tests.training.test_resume import config


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "state").mkdir()
    (tmp_path / "weights").write_bytes(bytes(range(256)) * 1000)
    (tmp_path / "state" / "state.json").write_text("{}")
    seal(tmp_path)
    return tmp_path


def test_a_sealed_folder_is_intact_and_accepts_new_files(folder):
    assert damage(folder) is None
    (folder / "notes").write_text("later")
    assert damage(folder) is None
    seal(folder)  # again
    assert damage(folder) is None
    assert sorted(json.loads((folder / "manifest.json").read_text())) == ["notes", "state/state.json", "weights"]


@pytest.mark.parametrize("place", [0, 128_000, 255_999])
def test_one_flipped_bit_is_detected(folder, place):
    content = bytearray((folder / "weights").read_bytes())
    content[place] ^= 1
    (folder / "weights").write_bytes(content)
    assert damage(folder) == "weights was changed"


def test_truncated_and_missing_files_are_reported(folder):
    (folder / "state" / "state.json").write_text("{")
    assert damage(folder) == "state/state.json was changed"
    (folder / "state" / "state.json").unlink()
    assert damage(folder) == "state/state.json is missing"


@pytest.mark.parametrize("content", [b"", b"{", b"\xff"])
def test_an_invalid_or_missing_manifest_counts_as_damage(folder, content):
    (folder / "manifest.json").write_bytes(content)
    assert damage(folder)
    (folder / "manifest.json").unlink()
    assert damage(folder) == "manifest.json is missing"


OTHERS = ("state/optimizer.safetensors", "state/state.json", "manifest.json")


@pytest.mark.parametrize("file", ["model.safetensors", *(pytest.param(file, marks=pytest.mark.long) for file in OTHERS)])
def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one(file, tmp_path, caplog):
    whole = rlzoo.train(config("fspo", tmp_path / "run"))
    damaged = whole.path / "checkpoints" / "step-000004" / file
    damaged.write_bytes(damaged.read_bytes()[:-7])  # as after a loss of power
    with caplog.at_level(logging.WARNING, logger="rlzoo"):
        again = rlzoo.train(config("fspo", tmp_path / "run"), resume=True)
    assert f"step-000004 is damaged: {file}" in caplog.text
    assert without_times(again.metrics) == without_times(whole.metrics)
    assert damage(damaged.parents[file.count("/")]) is None  # written again


def test_a_run_without_an_intact_checkpoint_is_refused(tmp_path):
    whole = rlzoo.train(config("fspo", tmp_path / "run"))
    for checkpoint in (whole.path / "checkpoints").iterdir():
        (checkpoint / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"--resume: every checkpoint in .* is damaged"):
        rlzoo.train(config("fspo", tmp_path / "run"), resume=True)


def test_an_unreadable_sealed_file_is_not_reported_as_damaged(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"weights")
    seal(tmp_path)
    with without_rights(file), pytest.raises(UserError, match=r"cannot be read: .*check the permissions"):
        damage(tmp_path)
    assert damage(tmp_path) is None
