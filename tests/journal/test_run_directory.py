"""Nothing in a run directory is lost: attacks on one short run, each on a copy of it."""

import errno
import itertools
import logging
import os
import resource
import shutil
import signal
import stat
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

import rlzoo
from rlzoo import UserError
from rlzoo.core.errors import RunError
from rlzoo.gate.settings import usual_output
from rlzoo.journal.checkpoints import own_checkpoints, rotate, tidy
from rlzoo.journal.manifest import damage
from rlzoo.journal.run_directory import RunDirectory
from rlzoo.journal.state import identity, newest_state
from rlzoo.lab.evaluation import EvaluationConfig
from rlzoo.lab.recorded import RecordedRun
from rlzoo.lab.runs import find_runs
from rlzoo.support.atomic import temporary_path
from rlzoo.support.lock import Lock
from rlzoo.training import stopping
from tests.rules import few
from tests.training.short import lines, quick, resumes_after, without_times

pytestmark = pytest.mark.usefixtures("interrupts")
OVERRIDES = ["tracking.mlflow=false", "eval.num_problems=0", "checkpoint.every=2"]


def config(folder, *overrides, steps=4, **settings):
    return quick(folder, steps=steps, overrides=[*OVERRIDES, *overrides], **settings)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of four steps with checkpoints of steps 2 and 4."""
    return rlzoo.train(config(tmp_path_factory.mktemp("whole") / "run"))


@pytest.fixture
def run(whole, tmp_path):
    """A copy of that run."""
    return shutil.copytree(whole.path, tmp_path / "run")


def resume(run, *, after=4, **settings):
    """Resume the run from its checkpoint of this step."""
    with resumes_after(after, run):
        return rlzoo.train(config(run, **settings), resume=True)


def tree(folder):
    """Every file with its content."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def refuses(run, *parts, **settings):
    """A resume that is rejected in one line and changes nothing."""
    before = tree(run)
    with pytest.raises(UserError) as refused:
        rlzoo.train(config(run, **settings), resume=True)
    line = str(refused.value)
    assert "\n" not in line
    for part in parts:
        assert part in line
    assert tree(run) == before
    return line


# stopped runs


@pytest.mark.long
def test_ctrl_c_twice_in_two_different_steps_leaves_a_resumable_run(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(stopping, "ONE_PRESS", -1.0)
    folder = tmp_path / "run"

    def at(number):
        def stop(step, metrics):
            if step == number:
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)

        return stop

    short = ["checkpoint.keep=1"]
    with pytest.raises(KeyboardInterrupt):
        rlzoo.train(config(folder, *short), at(3))
    assert names(folder) == ["step-000002"]
    for step in (3, 4):
        with resumes_after(2, folder), pytest.raises(KeyboardInterrupt):
            rlzoo.train(config(folder, *short), at(step), resume=True)
    assert names(folder) == ["step-000002"]
    with resumes_after(2, folder):
        result = rlzoo.train(config(folder, *short), resume=True)
    assert without_times(result.metrics) == without_times(whole.metrics)


@pytest.mark.long
def test_an_error_in_every_step_leaves_the_last_checkpoint(run, whole, monkeypatch):
    shutil.rmtree(run / "checkpoints" / "step-000004")
    from rlzoo.learner.learner import Learner

    def fail(self, *arguments, **options):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "apply", fail)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="out of memory"):
                resume(run, after=2)
    assert names(run) == ["step-000002"]
    assert without_times(resume(run, after=2).metrics) == without_times(whole.metrics)


@pytest.mark.long
def test_a_step_that_failed_before_its_update_reuses_its_questions(whole, tmp_path, monkeypatch):
    from rlzoo.training import loop

    made, calls = loop.collate, []

    def fail_at_the_third(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return made(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "collate", fail_at_the_third)
        with pytest.raises(RuntimeError, match="out of memory"):
            rlzoo.train(config(tmp_path / "run", "checkpoint.every=0"))
    assert names(tmp_path / "run") == ["step-000002"]
    with resumes_after(2, tmp_path / "run"):
        result = rlzoo.train(config(tmp_path / "run", "checkpoint.every=0"), resume=True)
    assert without_times(result.metrics) == without_times(whole.metrics)


# rotation


def plant(checkpoints):
    """Files of the user beside and in checkpoints."""
    for name in ("best-copy", "step-000002-mine", "step-000001"):
        shutil.copytree(checkpoints / "step-000002", checkpoints / name)
    for name in ("zz-a/mine", ".git/mine", "notes.txt", "step-000009", "step-000002/notes.txt"):
        (checkpoints / name).parent.mkdir(exist_ok=True)
        (checkpoints / name).write_text("mine")


def test_nothing_that_rlzoo_did_not_write_is_counted_or_deleted(run):
    before = tree(run)
    plant(run / "checkpoints")
    planted = {name: content for name, content in tree(run).items() if name not in before}
    resume(run, steps=8)
    after = tree(run)
    assert {name: after.get(name) for name in planted} == planted
    assert [name for name in after if name.startswith("checkpoints/step-000002/")] == ["checkpoints/step-000002/notes.txt"]
    assert [state.step for state, _ in own_checkpoints(run, 99)] == [6, 8]


def test_a_foreign_file_with_a_checkpoint_name_is_moved_aside(run, caplog):
    checkpoints = run / "checkpoints"
    (checkpoints / "step-000006").write_text("mine")
    (checkpoints / ".step-000006.part").write_text("mine")
    (checkpoints / "step-000008").mkdir()
    (checkpoints / "step-000008" / "mine").write_text("mine")
    result = resume(run, steps=8)
    assert (checkpoints / "step-000006.aside-1").read_text() == (checkpoints / ".step-000006.part").read_text() == "mine"
    assert tree(checkpoints / "step-000008.aside-1") == {"mine": b"mine"}
    assert newest_state(result.path).parent.name == "step-000008"
    assert "renamed to step-000008.aside-1" in caplog.text


def test_rotation_ignores_steps_after_the_newest(run):
    rotate(run, 2, keep=1, scores={})
    assert names(run) == ["step-000002", "step-000004"]
    rotate(run, 4, keep=1, scores={})
    assert names(run) == ["step-000004"]


@pytest.mark.parametrize("moment", ["before the damaged one is removed", "while it is removed"])
def test_a_kill_while_a_checkpoint_is_rewritten_loses_no_checkpoint(run, whole, moment):
    newest = run / "checkpoints" / "step-000004"
    shutil.copytree(newest, temporary_path(newest, identity(run)))
    (newest / "notes.txt").write_text("mine")
    (newest / "model.safetensors").write_bytes(b"damaged")
    if moment.startswith("while"):
        (newest / "model.safetensors").unlink()
        (newest / "state" / "optimizer.safetensors").unlink()
    result = resume(run, after=2)
    assert without_times(result.metrics) == without_times(whole.metrics)
    assert damage(newest) is None
    assert [path.read_text() for path in (run / "checkpoints").rglob("notes.txt")] == ["mine"]
    assert not list((run / "checkpoints").glob(".*"))


class Killed(BaseException):
    """The process ends here."""


def killed_at(monkeypatch, call, moment):
    """Make a call, and end it before one of its changes to the file system; returns False if it makes fewer changes."""
    changes = itertools.count()

    def dying(change):
        def changed(*args, **kwargs):
            if next(changes) == moment:
                raise Killed
            return change(*args, **kwargs)

        return changed

    with monkeypatch.context() as patch:
        for name in ("unlink", "rmdir", "rename", "replace"):
            patch.setattr(Path, name, dying(getattr(Path, name)))
        with suppress(Killed):
            call()
    return next(changes) > moment


@pytest.mark.parametrize("mine", [(), ("notes.txt", "state/notes.txt", "tokenizer.model")], ids=["", "a user's files"])
def test_a_kill_while_a_checkpoint_is_removed_leaves_only_user_files(run, monkeypatch, mine):
    for name in mine:  # added later, one with a name that a checkpoint may contain
        (run / "checkpoints" / "step-000002" / name).write_text("mine")
    newest = tree(run / "checkpoints" / "step-000004")
    was_killed, moment = True, 0
    while was_killed:
        again = shutil.copytree(run, run.parent / f"killed-{moment}")
        was_killed = killed_at(monkeypatch, partial(rotate, again, 4, keep=1, scores={}), moment)
        assert [state.step for state, _ in own_checkpoints(again, 4)] in ([4], [2, 4])
        tidy(again)
        rotate(again, 4, keep=1, scores={})
        assert tree(again / "checkpoints" / "step-000004") == newest
        others = tree(again / "checkpoints").keys() - {f"step-000004/{name}" for name in newest}
        assert others == {f"step-000002/{name}" for name in mine}
        assert names(again) == (["step-000002"] if mine else []) + ["step-000004"]
        moment += 1
    assert moment > 10


# resuming never destroys


def test_a_run_without_its_checkpoints_is_refused_and_unchanged(run):
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    assert "start another run with another --output" in refuses(run, "has steps up to 4, but its checkpoints/ has no")
    refuses(run, "has steps up to 4, but its checkpoints/ has no checkpoint", steps=8)


def test_a_run_without_a_step_starts_from_the_beginning(run, whole, caplog):
    shutil.rmtree(run / "checkpoints")
    shutil.rmtree(run / "rollouts")
    file = run / "metrics.jsonl"
    file.write_text(file.read_text().splitlines(keepends=True)[0])
    assert without_times(resume(run, after=None).metrics) == without_times(whole.metrics)
    assert "has no steps yet: starting at step 0" in caplog.text


# temporary files


TEMPORARY = ("checkpoints/.step-000006.part/weights", "rollouts/.000005.jsonl.part", ".metrics.jsonl.part")


def test_user_files_with_temporary_names_are_kept(run):
    for name in TEMPORARY:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("mine")
    resume(run, steps=6)
    assert {name: (run / name).read_text() for name in TEMPORARY} == dict.fromkeys(TEMPORARY, "mine")


FOLDERS = ("checkpoints/step-000005", "rollouts/000005.safetensors")


def test_temporary_files_of_a_killed_process_are_removed(run):
    names = ("rollouts/000005.jsonl", "metrics.jsonl", "figures/completions/step-000005.html", "figures/lre.html")
    folders, left = ([temporary_path(run / name, identity(run)) for name in part] for part in (FOLDERS, names))
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / ".tmpAb1Cd2").write_text("half of it")  # safetensors uses such names
    shutil.copytree(run / "checkpoints" / "step-000004", folders[0], dirs_exist_ok=True)
    (folders[0] / "state" / ".tmpAb1Cd2").write_text("half of it")
    for file in left:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("half of it")
    before = {path for path in run.rglob("*") if not path.is_relative_to(folders[0])} - {*folders, *left}
    resume(run, steps=5)
    assert [path for path in (*folders, *left) if path.exists()] == []
    assert not [path for path in set(run.rglob("*")) - before if "aside" in path.name or ".tmp" in path.name]


def test_a_run_with_weights_only_checkpoints_is_refused_and_unchanged(run):
    for folder in (run / "checkpoints").iterdir():
        shutil.rmtree(folder / "state")
    refuses(run, "no checkpoint to resume from")


@pytest.mark.parametrize("rows", [None, 0, 3], ids=["missing", "empty", "cut"])
def test_metrics_that_end_before_the_checkpoint_are_refused(run, rows):
    file = run / "metrics.jsonl"
    kept = file.read_text().splitlines(keepends=True)[:rows]
    file.unlink() if rows is None else file.write_text("".join(kept))
    refuses(run, "the checkpoint is from step 4", "metrics.jsonl' " + ("has only" if rows else "is missing or empty"))


def test_a_last_row_without_a_newline_is_read(run, whole):
    file = run / "metrics.jsonl"
    file.write_text(file.read_text().rstrip("\n"))
    assert without_times(resume(run).metrics) == without_times(whole.metrics)


def test_steps_after_the_checkpoint_are_archived_and_repeated(run, whole, caplog):
    newest = run / "checkpoints" / "step-000004" / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-7])
    before = tree(run / "rollouts")
    with caplog.at_level(logging.INFO, "rlzoo"):
        result = resume(run, after=2)
    assert f"moved everything that the run wrote after step 2 to {run}/superseded/1" in caplog.text
    superseded = run / "superseded" / "1"
    assert [row["step"] for row in lines(superseded / "metrics.jsonl")] == [3, 4]
    assert tree(superseded / "rollouts").items() <= before.items()
    assert len(tree(superseded / "rollouts")) == 4
    assert tree(run / "rollouts") == before
    assert without_times(result.metrics) == without_times(whole.metrics)


# who wrote a checkpoint


def test_a_checkpoint_of_another_run_with_the_same_seed_is_refused(run, whole, tmp_path):
    other = rlzoo.train(config(tmp_path / "other", "learner.lr=1e-3", steps=2))
    shutil.rmtree(run / "checkpoints" / "step-000002")
    shutil.rmtree(run / "checkpoints" / "step-000004")
    shutil.copytree(other.path / "checkpoints" / "step-000002", run / "checkpoints" / "step-000002")
    refuses(run, "is a checkpoint of another run; move it away")


def test_a_run_that_lost_its_identity_is_refused(run):
    (run / "run.json").unlink()
    refuses(run, "run.json' is missing; restore it")


def test_a_checkpoint_after_the_last_step_is_refused(run):
    refuses(run, "is from step 4, but the run ends at step 3 (steps)", steps=3)


# unexpected content


def litter(run):
    """Files that desktops, cleaners and people leave."""
    for folder in (run, run / "rollouts", run / "checkpoints"):
        (folder / ".DS_Store").write_text("mine")
        (folder / ".part").write_text("mine")
        (folder / "notes.txt").write_text("mine")
        (folder / "lost").mkdir()
    (run / "rollouts" / "._000001.safetensors").write_text("mine")
    (run / "checkpoints" / "step-000099").write_text("mine")
    (run / "checkpoints" / "step-000099-mine").mkdir()


def test_commands_that_read_runs_ignore_unrelated_files(run):
    expected = len(RecordedRun.read(run).updates)
    litter(run)
    assert len(RecordedRun.read(run).updates) == expected
    records, notes = find_runs([run])
    assert (len(records), notes) == (1, [])
    evaluated = EvaluationConfig.compose(str(run), [], suites=("gsm8k",))
    assert evaluated.model.path.endswith("checkpoints/step-000004")
    assert [row["step"] for row in lines(resume(run, steps=5).path / "metrics.jsonl")] == [0, 1, 2, 3, 4, 5]
    for name in (".DS_Store", ".part", "notes.txt"):
        assert all((folder / name).read_text() == "mine" for folder in (run, run / "rollouts", run / "checkpoints"))


def test_a_missing_rollout_folder_is_recreated(run):
    shutil.rmtree(run / "rollouts")
    assert len(find_runs([run])[0]) == 1
    with pytest.raises(UserError, match="no recorded rollouts"):
        RecordedRun.read(run)
    resume(run, steps=5)
    assert [path.name for path in sorted((run / "rollouts").iterdir())] == ["000005.jsonl", "000005.safetensors"]


# location


@pytest.mark.parametrize("kind", ["empty folder", "link to an empty folder", "current folder", "volume"])
def test_an_empty_directory_of_any_kind_is_filled(kind, tmp_path, monkeypatch):
    target = tmp_path / "target"
    target.mkdir()
    path = target
    if kind.startswith("link"):
        path = tmp_path / "link"
        path.symlink_to(target)
    elif kind.startswith("current"):
        monkeypatch.chdir(target)
        path = path.relative_to(target)
    elif kind == "volume":
        (target / "lost+found").mkdir()
    inode = target.stat().st_ino
    directory = RunDirectory.create(path, "steps: 1\n")
    directory.log(0, {"a": 1.0})
    directory.close()
    assert target.stat().st_ino == inode, "a mount point cannot be replaced"
    assert (target / "config.yaml").read_text() == "steps: 1\n"
    assert lines(target / "metrics.jsonl") == [{"step": 0, "a": 1.0}]
    assert not list(tmp_path.rglob("*.part"))


def killed_at_a_write(path, moment):
    """Create a run directory in a process that is killed before it gives a file its name."""
    child = os.fork()
    if not child:
        calls, replace = itertools.count(), Path.replace

        def die(self, other):
            if next(calls) == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return replace(self, other)

        Path.replace = die
        RunDirectory.create(path, "steps: 1\n")
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert not (path / "config.yaml").exists()


@pytest.mark.parametrize("moment", [0, 1])
def test_a_creation_that_was_killed_is_completed_by_the_same_command(moment, tmp_path):
    killed_at_a_write(tmp_path / "run", moment)
    RunDirectory.create(tmp_path / "run", "steps: 2\n").close()
    assert (tmp_path / "run" / "config.yaml").read_text() == "steps: 2\n"
    with pytest.raises(UserError, match="is not empty; its run has no steps yet: start it with --resume --allow-changed"):
        RunDirectory.create(tmp_path / "run", "steps: 1\n")
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="is not empty; resume this run with --resume, choose"):
        RunDirectory.create(tmp_path / "run", "steps: 1\n")


def test_a_half_created_directory_with_a_users_file_is_refused(tmp_path):
    killed_at_a_write(tmp_path / "run", 1)
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        RunDirectory.create(tmp_path / "run", "steps: 1\n")


def test_runs_that_start_in_the_same_second_have_separate_directories(tmp_path):
    settings = config(tmp_path)
    assert len({usual_output(settings) for _ in range(100)}) == 100


def test_a_resume_that_fails_or_is_killed_leaves_no_temporary_file(run, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    directory = RunDirectory.resume(run)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            directory.cut_after(2)
    directory.close()
    assert not list(run.rglob("*.part"))
    left = temporary_path(run / "metrics.jsonl", identity(run))
    left.write_text("half of it")
    RunDirectory.resume(run).close()
    assert not left.exists()


@pytest.mark.parametrize("kind", ["file", "dangling link", "not UTF-8", "too long"])
def test_an_output_that_cannot_be_a_directory_is_refused_and_leaves_nothing(kind, tmp_path):
    path = tmp_path / "run"
    if kind == "file":
        path.write_text("mine")
    elif kind == "dangling link":
        path.symlink_to(tmp_path / "nowhere")
    else:
        path = tmp_path / ("caf\udce9" if kind == "not UTF-8" else "x" * 300)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError) as refused:
        rlzoo.train(config(path))
    assert "\n" not in str(refused.value)
    assert sorted(tmp_path.iterdir()) == before


def test_the_longest_name_works_and_a_name_with_a_space_is_quoted(tmp_path, caplog):
    path = tmp_path / (f"a run {'x' * 255}"[:255])
    with pytest.raises(KeyboardInterrupt):
        rlzoo.train(config(path), lambda step, metrics: os.kill(os.getpid(), signal.SIGINT) if step == 1 else None)
    assert f"--output '{path}'" in caplog.text


# one process at a time


def test_one_process_at_a_time_holds_the_lock(tmp_path):
    lock = Lock(tmp_path)
    with pytest.raises(UserError, match=f"is in use by process {os.getpid()}"):
        Lock(tmp_path)
    lock.release()
    Lock(tmp_path).release()


# a full disk


class Full:
    """Simulates a full disk without root rights, by limiting the size of files until `free` is called."""

    def __init__(self):
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self, size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, self.before[1]))

    def free(self):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


@pytest.fixture
def disk():
    full = Full()
    yield full
    full.free()


def fails_for_space(act, *parts):
    with pytest.raises(RunError) as failed:
        act()
    line = str(failed.value)
    assert "\n" not in line
    for part in ("File too large", " free (", *parts):
        assert part in line


@pytest.mark.parametrize("size", [0, 60])
def test_a_disk_that_is_full_at_the_start_is_reported_in_one_line(disk, tmp_path, size):
    disk.fill(size)
    fails_for_space(lambda: rlzoo.train(config(tmp_path / "run")), "once that is fixed, run the same command again")
    disk.free()
    rlzoo.train(config(tmp_path / "run", steps=1))


@pytest.mark.parametrize(
    ("size", "where"),
    [
        pytest.param(1_000, "rollouts/000002.jsonl", marks=pytest.mark.long),
        pytest.param(6_000, "rollouts/000002.safetensors", marks=pytest.mark.long),
        (200_000, "checkpoints/step-000002)"),
    ],
)
def test_a_disk_that_fills_during_a_run_is_reported_and_the_run_resumes(disk, whole, tmp_path, size, where):
    check_a_disk_that_fills(disk, whole, tmp_path / "run", size, where, full_after=1, resumed_after=0)


@pytest.mark.long
def test_a_disk_without_room_for_a_checkpoint_fails_before_the_first_step(disk, whole, tmp_path):
    where = "checkpoints/step-000000)"
    check_a_disk_that_fills(disk, whole, tmp_path / "run", 200_000, where, full_after=0, resumed_after=None)


def check_a_disk_that_fills(disk, whole, folder, size, where, *, full_after, resumed_after):
    def fill(step, metrics):
        if step == full_after:
            disk.fill(size)

    fails_for_space(lambda: rlzoo.train(config(folder), fill), where, f"resume with: rlzoo train --resume --output {folder}")
    disk.free()
    assert not list((folder / "checkpoints").glob(".*")), "what could not be written takes no space"
    with resumes_after(resumed_after, folder):
        result = rlzoo.train(config(folder), resume=True)
    assert without_times(result.metrics) == without_times(whole.metrics)


def test_a_disk_that_is_full_on_resume_is_reported_and_changes_nothing(disk, run, whole):
    shutil.rmtree(run / "checkpoints" / "step-000004")
    before = tree(run)
    disk.fill(10)
    fails_for_space(lambda: resume(run, after=2), "metrics.jsonl")
    disk.free()
    after = tree(run)
    assert {name: after[name] for name in before if not name.startswith("summary")} == {
        name: before[name] for name in before if not name.startswith("summary")
    }
    assert without_times(resume(run, after=2).metrics) == without_times(whole.metrics)


def test_a_disk_that_is_full_at_the_end_is_reported_in_one_line(disk, run, whole):
    disk.fill(10)
    fails_for_space(lambda: resume(run), "needed")
    disk.free()
    assert without_times(resume(run).metrics) == without_times(whole.metrics)


@pytest.mark.parametrize(("umask", "mode"), few([(0o027, 0o640), (0o022, 0o644), (0o002, 0o664)]))
def test_files_have_the_mode_that_the_umask_gives(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        overrides = ["learner.lora.rank=2", "checkpoint.every=1"]
        run = rlzoo.train(config(tmp_path / "run", *overrides, steps=1)).path
    finally:
        os.umask(before)
    files = {str(path.relative_to(run)): stat.S_IMODE(path.stat().st_mode) for path in run.rglob("*") if path.is_file()}
    step = "checkpoints/step-000001"
    assert {
        f"{step}/model.safetensors", f"{step}/adapter/adapter_model.safetensors", f"{step}/state/optimizer.safetensors",
        f"{step}/state/monitor.safetensors", "rollouts/000001.safetensors",
    } <= files.keys()  # fmt: skip
    assert set(files.values()) == {mode}
