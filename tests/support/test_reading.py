"""Files that a user names: only regular files of a reasonable size are read, and nothing waits for a pipe."""

import contextlib
import os
import socket
import tempfile
from pathlib import Path

import pytest
import torch

from rlzoo.config.composition import read_config
from rlzoo.config.sections import LaunchConfig
from rlzoo.core.errors import UserError
from rlzoo.core.settings import user_path
from rlzoo.core.zoo import load_zoo
from rlzoo.journal.manifest import FILE, damage
from rlzoo.journal.rollout_file import RolloutFile
from rlzoo.journal.run_directory import read_metrics
from rlzoo.journal.state import IDENTITY, identity
from rlzoo.journal.tracking.uploads import Upload
from rlzoo.models.processes import deepspeed_settings, zero_settings
from rlzoo.support.reading import RECORDS, SETTINGS, NotReadError, read_text
from rlzoo.tasks.math_rows import read_problems

OTHER = "is a pipe, socket or device, not a file"
KINDS = {"pipe": OTHER, "socket": OTHER, "device": OTHER, "folder": "is a folder", "sparse": "bytes"}


@pytest.fixture
def odd(request, tmp_path):
    """Create something that is not a readable file."""
    opened = []

    def make(kind, name):
        path = tmp_path / name
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "socket":
            opened.append(socket.socket(socket.AF_UNIX))
            short = Path(tempfile.mkdtemp()) / "s"  # the name of a socket has at most 107 bytes
            opened[-1].bind(str(short))
            path.symlink_to(short)
        elif kind == "device":
            path.symlink_to("/dev/zero")
        elif kind == "folder":
            path.mkdir()
        else:
            with path.open("wb") as file:
                file.truncate(2**40)
        return path

    yield make
    for one in opened:
        one.close()


@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_of_a_sensible_size_are_read(odd, kind):
    with pytest.raises(NotReadError, match=KINDS[kind]):
        read_text(odd(kind, "given"), SETTINGS)


def test_a_file_is_read_to_its_last_byte_and_no_more(tmp_path):
    file = tmp_path / "file"
    file.write_bytes("ä\r\nb\n".encode())
    assert read_text(file, 6) == "ä\nb\n"
    with pytest.raises(NotReadError, match=r"has 6 bytes \(at most 5 are allowed\)"):
        read_text(file, 5)
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "missing", 5)


def read_deepspeed(path):
    return deepspeed_settings(LaunchConfig(deepspeed=str(path)), bf16=False, max_grad_norm=1.0)


READERS = {
    "config": ("given.yaml", read_config),
    "data": ("given.jsonl", lambda path: read_problems(str(path), "train", None)),
    "metrics": ("metrics.jsonl", read_metrics),
    "DeepSpeed's settings": (
        "given.json",
        lambda path: deepspeed_settings(LaunchConfig(deepspeed=str(path)), bf16=False, max_grad_norm=1.0),
    ),
    "plugin": ("given.py", lambda path: load_zoo([str(path)])),
}


@pytest.mark.parametrize(
    ("reader", "kind"),
    [(reader, kind) for reader in READERS for kind in KINDS if kind != "folder" or reader not in ("plugin", "data")],
)
def test_what_a_user_names_is_refused_in_one_line(odd, kind, reader):
    name, read = READERS[reader]
    with pytest.raises(UserError) as caught:
        read(odd(kind, name))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_manifest_of_another_kind_is_damage(odd, tmp_path, kind):
    odd(kind, FILE)
    assert damage(tmp_path).startswith(f"{FILE} is not valid: ")


def test_a_file_of_rows_may_be_large():
    assert SETTINGS < RECORDS


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
def test_a_file_without_permissions_is_not_to_be_removed(tmp_path, kind):
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
