"""The process that uploads a run to MLflow survives the run, and the run survives it."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from rlzoo.journal.tracking.follow import PATIENCE, follow
from rlzoo.journal.tracking.tracker import Tracker
from rlzoo.journal.tracking.uploads import Upload, Uploaded, run_id_of, tracking_uri
from tests.journal.tracking.followed import add_row, history, store


def status(directory):
    return store().get_run(run_id_of(directory)).info.status


def until(condition, seconds=60):
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "waited in vain"
        time.sleep(0.05)


def tracked(directory, work=lambda tracker: None):
    with Tracker(is_on=True) as tracker:
        tracker.begin(directory, Upload.new("tests", "mine", tags={}, params={}))
        work(tracker)
        add_row(directory, 3)
    return tracker


def test_a_run_is_uploaded_while_it_is_running(directory):
    (directory / "tracking" / "record.json").unlink()

    def work(tracker):
        until(lambda: run_id_of(directory) and [point[0] for point in history(directory)] == [0, 1, 2])
        assert status(directory) == "RUNNING"
        tracker.look()
        tracker.conclude(3, {"reward": 0.5}, {"warnings": "inert"})

    tracker = tracked(directory, work)
    assert [point[0] for point in history(directory)] == [0, 1, 2, 3]
    run = store().get_run(tracker.run_id)
    assert (run.info.status, run.data.tags["warnings"], run.data.metrics["reward"]) == ("FINISHED", "inert", 0.5)


@pytest.mark.long
def test_mlflow_measures_the_machine_while_a_run_is_tracked(directory, monkeypatch):
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    (directory / "tracking" / "record.json").unlink()

    def steps():
        return [point[0] for point in history(directory, "system/cpu_utilization_percentage")]

    tracked(directory, lambda tracker: until(lambda: run_id_of(directory) and len(steps()) > 1))
    before = len(steps())
    add_row(directory, 4)  # by a resumed run
    tracked(directory, lambda tracker: until(lambda: len(steps()) > before))
    assert steps() == list(range(len(steps())))


@pytest.mark.long
@pytest.mark.parametrize(("error", "expected"), [(ValueError, "FAILED"), (KeyboardInterrupt, "KILLED"), (SystemExit, "KILLED")])
def test_the_final_status_of_a_run_is_sent(directory, error, expected):
    def work(tracker):
        raise error

    with pytest.raises(error):
        tracked(directory, work)
    assert status(directory) == expected
    assert [point[0] for point in history(directory)] == [0, 1, 2]


def test_a_run_that_does_not_start_creates_no_store(monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/none.db")
    with pytest.raises(ValueError, match="no such model"), Tracker(is_on=True):
        raise ValueError("no such model")
    assert not (tmp_path / "none.db").exists()


RUN = """
import sys, time
from pathlib import Path
from rlzoo.journal.tracking.uploads import Upload
from rlzoo.journal.tracking.tracker import Tracker
with Tracker(is_on=True) as tracker:
    tracker.begin(Path(sys.argv[1]), Upload.new("tests", "mine", tags={}, params={}))
    print("begun", flush=True)
    time.sleep(60)
"""


@pytest.mark.long
@pytest.mark.parametrize("when", ["at once", "later"])
def test_a_killed_run_is_uploaded_completely(directory, when):
    with subprocess.Popen([sys.executable, "-c", RUN, str(directory)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "begun\n"
        if when == "later":
            until(lambda: run_id_of(directory) and [point[0] for point in history(directory)] == [0, 1, 2])
        process.kill()
    until(lambda: run_id_of(directory) and status(directory) == "KILLED")
    assert [point[0] for point in history(directory)] == [0, 1, 2]


@pytest.mark.long
def test_a_run_continues_if_its_follower_is_killed(directory, caplog):
    def work(tracker):
        until(lambda: run_id_of(directory) and [point[0] for point in history(directory)] == [0, 1, 2])
        os.kill(tracker._process.pid, signal.SIGKILL)
        tracker._process.wait()
        tracker.look()

    tracked(directory, work)
    assert "the process that sends the data exited with code -9" in caplog.text
    assert f"rlzoo sync {directory}" in caplog.text


def test_a_follower_that_dies_on_start_does_not_affect_the_run(directory, caplog):
    with Tracker(is_on=True) as tracker:
        os.kill(tracker._process.pid, signal.SIGKILL)
        tracker._process.wait()
        tracker.begin(directory, Upload.new("tests", "mine", tags={}, params={}))
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "the process that sends the data exited with code -9" in line
    assert f"rlzoo sync {directory}" in line


@pytest.mark.long
def test_a_follower_that_cannot_import_mlflow_reports_it_in_one_line(directory, tmp_path, monkeypatch, capfd, caplog):
    (tmp_path / "broken" / "mlflow").mkdir(parents=True)
    (tmp_path / "broken" / "mlflow" / "__init__.py").write_text("raise RuntimeError('no home directory')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "broken"), *sys.path]))
    tracked(directory)
    assert capfd.readouterr().err == "cannot send the run to MLflow: RuntimeError: no home directory\n"
    assert f"rlzoo sync {directory}" in caplog.text


@pytest.mark.long
def test_an_unreachable_store_is_reported_once_and_retried_later(directory, zygote, caplog, monkeypatch):
    usual = tracking_uri()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        closed = f"http://me:secret@127.0.0.1:{probe.getsockname()[1]}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", closed)

    def work(tracker):
        until(lambda: Uploaded.read(directory, tracking_uri()).trouble)
        for _ in range(3):
            tracker.look()

    started = time.monotonic()
    tracker = tracked(directory, work)
    assert time.monotonic() - started < 3 * PATIENCE
    assert tracker.run_id is None
    first, second = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "cannot be reached" in first
    assert f"send the rest with: rlzoo sync {directory}" in second
    assert "secret" not in caplog.text + (directory / "tracking" / "sent.json").read_text()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", usual)
    answer = zygote.run("sync", directory, folder=directory)
    assert answer.returncode == 0, answer.stderr
    assert "4 steps and" in answer.stdout
    assert [point[0] for point in history(directory)] == [0, 1, 2, 3]
    assert status(directory) == "FINISHED"


class Flaky:
    """A store that fails a given number of times."""

    def __init__(self, *failures):
        self.failures, self.calls, self.reports = list(failures), [], []

    def send(self, *, is_over):
        self.calls.append(is_over)
        if self.failures and self.failures.pop(0):
            raise OSError("down")

    def report(self, trouble):
        self.reports.append(trouble)


def test_retries_back_off_while_the_store_is_down(monkeypatch):
    pauses = []

    def is_over(seconds):
        pauses.append(seconds)
        return len(pauses) == 9

    flaky = Flaky(*[True] * 7)
    assert follow(flaky, is_over, "sqlite://")
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 1.0]
    assert flaky.calls == [False] * 8 + [True]
    assert flaky.reports == ["OSError: down"] * 7


def test_the_follower_does_not_import_torch():
    code = "import sys, rlzoo.journal.tracking.follow; sys.exit('torch' in sys.modules)"  # a second and 200 MB for each run
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
