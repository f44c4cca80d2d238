"""`rlzoo runs` on the command line."""

import json
import shutil
from pathlib import Path

import pytest

from rlzoo.cli.runs import remove
from rlzoo.lab.runs import list_runs
from rlzoo.support.lock import Lock


@pytest.fixture
def folder(trained, tmp_path):
    """A finished run, an unfinished one, a folder that is not a run, and a removal that was interrupted."""
    folder = tmp_path / "here" / "runs"
    for name in ("done", "open", "removed"):
        shutil.copytree(trained.path, folder / name)
    rows = (folder / "open" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "open" / "metrics.jsonl").write_text("".join(rows[:3]))
    (folder / "open" / "summary.json").unlink()
    (folder / "removed" / "config.yaml").unlink()
    (folder / "notes").mkdir()
    return folder


def test_a_list_has_every_run_and_how_to_resume_it(rlzoo, folder, trained):
    lock = Lock(folder / "done")
    code, out, _ = rlzoo("runs", "list")
    lock.release()
    assert code == 0
    lines = {line.split()[0]: line.split() for line in out.splitlines()[1:4]}
    assert lines["runs/done"][1:5] == ["fspo", "0", "running", "4/4"]
    assert lines["runs/open"][1:5] == ["fspo", "0", "unfinished", "2/4"]
    assert "rlzoo train --resume --output runs/open" in out
    assert "rlzoo runs remove runs/removed" in out
    code, out, _ = rlzoo("runs", "list", folder, "--json")
    done, opened, _ = json.loads(out)
    assert (done["state"], done["command"]) == ("finished", "")
    assert done["bytes"] == sum(file.stat().st_size for file in (folder / "done").rglob("*") if file.is_file())
    rewards = [row["reward/mean"] for row in trained.metrics[1:]]
    assert (done["reward"], opened["reward"], done["accuracy"]) == (rewards[3], rewards[1], None)
    assert opened["seconds"] == pytest.approx(sum(row["time/rollout"] + row["time/learner"] for row in trained.metrics[1:3]))


def test_a_list_of_nothing_is_no_error_and_a_missing_folder_is_one(rlzoo, refused, tmp_path):
    assert "'runs' is not a folder" in refused("runs", "list")
    code, out, _ = rlzoo("runs", "list", tmp_path, "--json")
    assert (code, json.loads(out)) == (0, [])


def test_a_list_survives_files_that_vanish(folder, monkeypatch):
    lstat = Path.lstat

    def vanished(path):
        if path.name == "summary.json":
            raise FileNotFoundError(path)
        return lstat(path)

    summary = (folder / "done" / "summary.json").stat().st_size
    (before, *_) = list_runs(folder)
    monkeypatch.setattr(Path, "lstat", vanished)
    assert list_runs(folder)[0]["bytes"] == before["bytes"] - summary


def test_a_list_fits_into_eighty_columns(folder, monkeypatch, capfd):
    from rlzoo.cli.runs import list_

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(folder.parent)
    list_()
    rows = capfd.readouterr().out.splitlines()[:4]
    assert [row.split()[0] for row in rows] == ["run", "runs/done", "runs/open", "runs/removed"]
    assert max(map(len, rows)) <= 80


def test_a_removal_asks_and_never_removes_without_an_answer(rlzoo, refused, folder):
    assert "add --yes" in refused("runs", "remove", "runs/done")
    assert "is not a run" in refused("runs", "remove", "--yes", "runs/done", "runs/notes")
    lock = Lock(folder / "open")
    assert "in use by process" in refused("runs", "remove", "--yes", "runs/done", "runs/open")
    lock.release()
    assert len(list(folder.iterdir())) == 4
    (folder / "open" / "notes.txt").write_text("mine")
    code, out, _ = rlzoo("runs", "remove", "--yes", "runs/done", "runs/notes/../done", "runs/open", "runs/removed")
    assert code == 0
    assert "runs/open; kept what rlzoo did not write: notes.txt\n" in out
    assert sorted(path.name for path in folder.rglob("*")) == ["notes", "notes.txt", "open"]


@pytest.mark.parametrize(("answer", "is_removed"), [("y\n", True), ("n\n", False), ("\n", False), ("", False)])
def test_on_a_terminal_only_yes_removes(folder, monkeypatch, answer, is_removed):
    class Terminal:
        def isatty(self):
            return True

        def readline(self, *_):
            return answer

    monkeypatch.setattr("sys.stdin", Terminal())
    remove([folder / "done"])
    assert (folder / "done").exists() != is_removed
