"""A removal deletes what rlzoo wrote, and nothing else."""

import itertools
import json
import os
import shutil
from contextlib import ExitStack

import pytest

from rlzoo.core.errors import UserError
from rlzoo.journal.removal import lock_run, remove_run, run_at
from rlzoo.journal.state import identity
from rlzoo.support.atomic import temporary_path
from rlzoo.support.lock import Lock, is_locked


@pytest.fixture
def run(trained, tmp_path):
    """A copy of a run, next to a folder with a file of the user."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "000001.jsonl").write_text("mine")
    return shutil.copytree(trained.path, tmp_path / "run")


def removed(run):
    with ExitStack() as locks:
        return remove_run(lock_run(run, locks))


def files(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_symlink() or path.is_file())


def test_a_run_without_other_files_is_removed_with_its_folder(run):
    assert removed(run) == []
    assert [path.name for path in run.parent.iterdir()] == ["elsewhere"]


def test_files_of_the_user_are_kept_wherever_they_are(run):
    (newest,) = (folder for folder in (run / "checkpoints").iterdir() if folder.name == "step-000004")
    mine = ["notes.txt", "rollouts/notes.txt", "rollouts/._000001.safetensors", f"checkpoints/{newest.name}/notes.txt"]
    mine += ["replay.html", "summary.json.bak", "figures/mine.png", "plugins/mine.py", "superseded/1/notes.txt"]
    for name in mine:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("mine")
    assert removed(run) == sorted(mine)
    assert files(run) == sorted(mine)
    assert {(run / name).read_text() for name in mine} == {"mine"}


def test_evaluations_are_removed_and_other_files_beside_them_kept(run):
    (run / "evaluations").mkdir(exist_ok=True)
    for name in ("000000.json", "000004.json", temporary_path(run / "000002.json", identity(run)).name, "notes.json"):
        (run / "evaluations" / name).write_text("{}")
    assert removed(run) == ["evaluations/notes.json"]
    assert files(run) == ["evaluations/notes.json"]


def test_links_are_neither_followed_nor_removed(run):
    elsewhere = run.parent / "elsewhere"
    shutil.rmtree(run / "rollouts")
    shutil.move(run / "checkpoints", elsewhere / "checkpoints")
    (run / "rollouts").symlink_to(elsewhere)
    (run / "checkpoints").symlink_to(elsewhere / "checkpoints")
    (run / "summary.json").unlink()
    (run / "summary.json").symlink_to(elsewhere / "000001.jsonl")
    before = files(elsewhere)
    assert removed(run) == ["checkpoints", "rollouts", "summary.json"]
    assert files(elsewhere) == before
    (run.parent / "link").symlink_to(elsewhere)
    with pytest.raises(UserError, match="is a link; pass the folder itself"):
        run_at(run.parent / "link")


def test_a_linked_folder_keeps_no_other_folder(run):
    shutil.move(run / "rollouts", run.parent / "elsewhere" / "rollouts")
    (run / "rollouts").symlink_to(run.parent / "elsewhere" / "rollouts")
    before = files(run.parent / "elsewhere")
    assert removed(run) == ["rollouts"]
    assert files(run.parent / "elsewhere") == before


def test_the_link_of_a_checkpoint_is_not_followed(run):
    shutil.move(run / "checkpoints" / "step-000004", run.parent / "elsewhere")
    (run / "checkpoints" / "step-000004").symlink_to(run.parent / "elsewhere" / "step-000004")
    before = files(run.parent / "elsewhere")
    assert removed(run) == ["checkpoints/step-000004"]
    assert files(run.parent / "elsewhere") == before


def test_the_lock_is_not_written_through_a_link(run):
    (run / ".lock").unlink(missing_ok=True)
    (run / ".lock").symlink_to(run.parent / "elsewhere" / "000001.jsonl")
    with pytest.raises(UserError, match="cannot be locked"):
        removed(run)
    assert (run.parent / "elsewhere" / "000001.jsonl").read_text() == "mine"


def test_folders_in_place_of_files_are_kept_with_their_contents(run):
    for name in ("metrics.jsonl", "config.yaml", "rollouts/000001.jsonl"):
        (run / name).unlink()
        (run / name).mkdir()
        (run / name / "mine.txt").write_text("mine")
    kept = [f"{name}/mine.txt" for name in ("config.yaml", "metrics.jsonl", "rollouts/000001.jsonl")]
    assert removed(run) == kept
    assert files(run) == kept


@pytest.mark.parametrize("name", ["inner", "superseded/1", "rollouts/more"])
def test_a_run_in_a_run_is_not_removed_with_it(run, trained, name):
    inner = shutil.copytree(trained.path, run / name)
    before = files(run)
    with pytest.raises(UserError, match=r"contains another run, .*; remove that one first"):
        removed(run)
    assert files(run) == before
    assert removed(inner) == removed(run) == []


def test_a_running_run_is_refused(run):
    (run / "tracking").mkdir()
    for folder in (run, run / "tracking"):
        lock = Lock(folder)
        assert is_locked(folder)
        with pytest.raises(UserError, match=f"in use by process {os.getpid()}"):
            removed(run)
        lock.release()
        assert not is_locked(folder)
    assert "config.yaml" in files(run)


def test_what_is_not_a_run_is_refused(run, tmp_path):
    other = tmp_path / "other"
    for content in (None, "[]", "{}", '{"id": "mine"}', '{"id": 3}', "no json"):
        other.mkdir(exist_ok=True)
        (other / "metrics.jsonl").write_text("mine")
        if content is not None:
            (other / "run.json").write_text(content)
        with pytest.raises(UserError, match=r"is not a run: it has no valid run\.json"):
            run_at(other)
    for path in (tmp_path, tmp_path / "none", run / "rollouts", run / "..", run / "config.yaml"):
        with pytest.raises(UserError, match="is not a run"):
            run_at(path)
    assert run_at(run / "rollouts" / ".." / ".." / "run") == run.resolve()


class Killed(BaseException):
    """As if the process was killed."""


@pytest.mark.long
def test_an_interrupted_removal_can_be_repeated(trained, tmp_path, monkeypatch):
    import pathlib

    unlink, left = pathlib.Path.unlink, 0

    def limited(path, missing_ok=False):
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed
        unlink(path, missing_ok)

    monkeypatch.setattr(pathlib.Path, "unlink", limited)
    for moment in itertools.count():
        run = shutil.copytree(trained.path, tmp_path / f"run-{moment}")
        (run / "checkpoints" / "step-000004" / "notes.txt").write_text("mine")
        left = moment
        try:
            removed(run)
            break  # it takes fewer steps
        except Killed:
            assert (run / "run.json").exists()
            assert moment == 0 or not (run / "config.yaml").exists()
        left = 10**6
        assert removed(run) == ["checkpoints/step-000004/notes.txt"]
        assert files(run) == ["checkpoints/step-000004/notes.txt"]
    assert moment > 20  # the run has more files than that


def test_copies_of_plugins_are_removed_unless_they_were_edited(run):
    facts = json.loads((run / "run.json").read_text())
    (run / "plugins").mkdir()
    for name, text in (("copied.py", "abc"), ("edited.py", "abcd")):
        (run / "plugins" / name).write_text(text)
        # SHA-256 of "abc", from FIPS 180-2
        facts["fingerprint"][f"plugin {name}"] = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    (run / "run.json").write_text(json.dumps(facts))
    assert removed(run) == ["plugins/edited.py"]
