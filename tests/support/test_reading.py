"""Text files of users, and what is said about a file that must not be read."""

import contextlib
import os
from pathlib import Path

import pytest
import torch

from rlzoo.config.composition import read_config
from rlzoo.config.sections import LaunchConfig
from rlzoo.core.errors import UserError
from rlzoo.core.settings import user_path
from rlzoo.journal.rollout_file import RolloutFile
from rlzoo.journal.state import IDENTITY, identity
from rlzoo.journal.tracking.uploads import Upload
from rlzoo.models.processes import zero_settings
from rlzoo.support.reading import read_text
from rlzoo.tasks.math_rows import read_problems


@contextlib.contextmanager
def without_rights(file):
    """Take the permission to read a file away inside the block, also from root."""
    file.chmod(0)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        file.chmod(0o644)


def recorded_file(folder):
    file = folder / "000003.safetensors"
    RolloutFile(3, torch.tensor([5, 7]), torch.tensor([2]), torch.tensor([False, True]), torch.tensor([0])).save(file)
    return file


UNREADABLE = {
    "rollouts": (recorded_file, RolloutFile.load),
    "record": (
        lambda folder: Upload.new("mine", "run", tags={}, params={}).write(folder) or folder / "tracking" / "record.json",
        lambda file: Upload.read(file.parent.parent),
    ),
    "identity": (
        lambda folder: (folder / IDENTITY).write_text('{"id": "1"}') and folder / IDENTITY,
        lambda file: identity(file.parent),
    ),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_the_error_for_an_unreadable_file_does_not_suggest_removing_it(tmp_path, kind):
    write, read = UNREADABLE[kind]
    file = write(tmp_path)
    read(file)
    with without_rights(file), pytest.raises(UserError, match=r"cannot be read: .*denied.*; check the permissions") as caught:
        read(file)
    assert "remove" not in str(caught.value)
    file.write_bytes(b"torn")
    with pytest.raises(UserError, match=r"; (if you )?(remove|restore) (it|the file)"):
        read(file)


def test_a_byte_order_mark_is_not_part_of_a_text(tmp_path):
    (tmp_path / "file").write_bytes("\ufeffä\r\nb\n".encode())
    assert read_text(tmp_path / "file") == "ä\nb\n"
    (tmp_path / "steps.yaml").write_bytes("\ufeffsteps: 3\n".encode())
    assert read_config(tmp_path / "steps.yaml") == {"steps": 3}
    row = '{"question": "1+1", "answer": "2"}'
    for name, rows in (("lines.jsonl", f"{row}\n"), ("list.json", f"[{row}]")):
        (tmp_path / name).write_bytes(f"\ufeff{rows}".encode())
        assert [problem.answer for problem in read_problems(str(tmp_path / name), "train", None)] == ["2"]
    (tmp_path / "zero.json").write_bytes('\ufeff{"zero_optimization": {"stage": 2}}'.encode())
    assert zero_settings(LaunchConfig(deepspeed=str(tmp_path / "zero.json"))) == {"stage": 2}


def test_the_home_folder_is_found_and_an_unknown_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert [str(user_path(path)) for path in ("~/a", Path("~/a"), "a/~")] == [f"{tmp_path}/a"] * 2 + ["a/~"]
    with pytest.raises(UserError, match=r"'~nobody-here/a': no such user; for a file of this name, write its absolute path"):
        user_path("~nobody-here/a")
