"""A misbehaving store costs a run one line of output, but no minutes and no lingering process."""

import signal
import subprocess
import sys
import time
from dataclasses import replace

import mlflow
import pytest
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

from rlzoo.cli.sync import sync
from rlzoo.core.errors import RunError
from rlzoo.journal.tracking import tracker as tracker_module
from rlzoo.journal.tracking.rows import accepted_name
from rlzoo.journal.tracking.store import describe, latest_experiment
from rlzoo.journal.tracking.sync import Sync
from rlzoo.journal.tracking.tracker import Tracker
from rlzoo.journal.tracking.uploads import Upload, Uploaded, run_id_of, tracking_uri
from tests.journal.tracking import hostile
from tests.journal.tracking.followed import add_row, end, history, send, store, three_steps


def error_of(sending):
    """Return the error of the store or its client library, which raise different exceptions."""
    try:
        sending.send(is_over=True)
    except Exception as error:
        return error
    raise AssertionError("the store took it")


@pytest.mark.parametrize("attack", hostile.ATTACKS, ids=lambda attack: attack.__name__)
def test_a_hostile_server_is_reported_in_one_line_without_delay(attack, directory, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    started = time.monotonic()
    with hostile.serving(attack) as address:
        error = error_of(Sync(directory, address))
    assert time.monotonic() - started < 10
    line = describe(error, address)
    assert line.isprintable()
    assert len(line) < 400


@pytest.mark.long
def test_the_end_of_a_run_does_not_wait_for_a_slow_server(directory, caplog, monkeypatch):
    monkeypatch.setattr(tracker_module, "LONGEST_END", 3.0)
    monkeypatch.setattr(tracker_module, "QUIET_END", 1.0)
    usual = tracking_uri()
    with hostile.serving(hostile.dripping_body) as address:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        with Tracker(is_on=True) as tracker:
            tracker.begin(directory, Upload.new("tests", "mine", tags={}, params={}))
            started = time.monotonic()
        assert 2 < time.monotonic() - started < 10
    assert tracker._process.poll() is not None, "no process stays"
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "did not accept everything within 3 s" in line
    assert f"rlzoo sync {directory}" in line
    monkeypatch.setenv("MLFLOW_TRACKING_URI", usual)
    sync([directory])  # raises if MLflow did not get everything
    assert [point[0] for point in history(directory)] == [0, 1, 2]


FOLLOW = """
import sys
import rlzoo.journal.tracking.follow as follow
follow.LONGEST_END = 2.0
sys.exit(follow.main())
"""


@pytest.mark.long
def test_the_follower_of_a_killed_run_gives_up_on_a_slow_server(directory, monkeypatch):
    with hostile.serving(hostile.dripping_headers) as address:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        command = [sys.executable, "-c", FOLLOW]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            process.stdin.write(f"{directory}\n")
            process.stdin.close()
            assert process.wait(30) == -signal.SIGALRM


def test_rows_whose_response_was_lost_are_not_sent_twice(directory, monkeypatch):
    whole, calls = mlflow.MlflowClient.log_batch, []

    def loses_the_answer(self, run_id, metrics=(), **others):
        whole(self, run_id, metrics=metrics, **others)
        if metrics:
            calls.append([point.step for point in metrics])
            if len(calls) == 1:
                raise TimeoutError("the reply took longer than 60 s")

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", loses_the_answer)
    sending = Sync(directory, tracking_uri())
    with pytest.raises(TimeoutError):
        sending.send(is_over=False)
    sending.send(is_over=False)
    assert calls == [[0, 1, 2]]
    assert [point[0] for point in history(directory)] == [0, 1, 2]


def test_a_store_that_was_deleted_is_filled_again(directory):
    end(directory)
    Uploaded(Upload.read(directory).id, "0" * 32, files={"config.yaml": [1, 1]}).write(directory, tracking_uri())
    assert send(directory).num_rows == 3
    assert [point[0] for point in history(directory)] == [0, 1, 2]
    assert {"config.yaml", "metrics.jsonl"} <= {item.path for item in store().list_artifacts(run_id_of(directory))}


@pytest.mark.long
def test_a_database_deleted_during_a_run_is_reported_and_nothing_is_lost(directory, own_store, zygote, capfd):
    sending = Sync(directory, tracking_uri())
    sending.send(is_over=False)
    (own_store / "mlflow.db").unlink()
    add_row(directory, 3)
    with pytest.raises(Exception, match="readonly database") as caught:
        sending.send(is_over=True)
    assert describe(caught.value, tracking_uri()).isprintable()
    # in another process, because this one keeps the deleted file open
    answer = zygote.run("sync", directory, folder=directory)
    assert answer.returncode == 0, answer.stderr
    assert "4 steps and" in answer.stdout, "what the deleted file took does not count as sent"


STRANGE = [
    "ftp://host/x", "file:///proc/nowhere", "sqlite:////proc/nowhere/x.db", "http://",
    "http://[::1", "http://host:port", "databricks", "uc:x", "postgresql://nobody@127.0.0.1:9/x", "oracle+none://x", "  ",
    "http://127.0.0.1:9/" + "x" * 10_000, "\ud800", "javascript:alert(1)", "://", "C:\\store",
]  # fmt: skip


@pytest.mark.parametrize("uri", STRANGE, ids=range(len(STRANGE)))
def test_an_invalid_tracking_uri_is_reported_in_one_line(uri, directory, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    sending = Sync(directory, uri)
    line = describe(error_of(sending), uri)
    sending.report(line)
    assert line.isprintable()
    assert len(line) < 400
    assert Uploaded.read(directory, uri).trouble == line


def test_asynchronous_logging_loses_no_error(directory, monkeypatch):
    def full(*arguments, **options):
        raise mlflow.MlflowException("disk is full")

    monkeypatch.setenv("MLFLOW_ENABLE_ASYNC_LOGGING", "true")
    sending = Sync(directory, tracking_uri())
    with monkeypatch.context() as patch:
        patch.setattr(SqlAlchemyStore, "log_batch", full)
        with pytest.raises(mlflow.MlflowException, match="disk is full"):
            sending.send(is_over=True)
    sending.send(is_over=True)
    assert [point[0] for point in history(directory)] == [0, 1, 2]


def test_names_that_mlflow_refuses_are_replaced_with_one_warning(directory, caplog):
    record = replace(Upload.read(directory), params={"task.arguments.correct!": "yes", "seed": "0"})
    record.write(directory)
    add_row(directory, 3, **{"env/pass@1": 1.0})
    end(directory, metrics={"env/best@1": 0.75, "reward": 0.5})
    send(directory)
    run = store().get_run(run_id_of(directory))
    assert set(run.data.params.values()) == {"yes", "0"}
    assert sorted(run.data.metrics.values()) == [0.3, 0.5, 0.75, 1.0]
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    for name in ("env/pass@1", "env/best@1", "task.arguments.correct!"):
        assert f"{name!r} is logged as {accepted_name(name)!r}" in line


@pytest.mark.parametrize("kind", ["run", "experiment"])
def test_a_deleted_mlflow_run_is_reported_with_the_command_to_restore_it(directory, kind):
    send(directory, is_over=False)
    run = store().get_run(run_id_of(directory))
    if kind == "run":
        store().delete_run(run.info.run_id)
        expected = f"run {run.info.run_id} was deleted; restore it with: mlflow runs restore --run-id {run.info.run_id}"
    else:
        store().delete_experiment(run.info.experiment_id)
        (directory / "tracking" / "sent.json").unlink()
        expected = f"'tests' was deleted; restore it with: mlflow experiments restore -x {run.info.experiment_id}"
    with pytest.raises(RunError, match=expected):
        send(directory)


def test_a_file_that_is_not_a_store_is_reported_at_once_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "mlflow.db").write_text("not a database\n" * 100)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    started = time.monotonic()
    with pytest.raises(RunError, match=r"^MLflow at sqlite:///.*cannot be used \(DatabaseError: file is not a database\)$"):
        latest_experiment()
    assert time.monotonic() - started < 10


SEND = """
import sys
from pathlib import Path
from rlzoo.journal.tracking.sync import Sync
Sync(Path(sys.argv[1]), sys.argv[2]).send(is_over=True)
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_concurrent_runs_share_a_new_store_even_if_its_creation_was_killed(tmp_path):
    uri = f"sqlite:///{tmp_path}/new/mlflow.db"
    folders = [tmp_path / str(number) for number in range(4)]
    for folder in folders:
        folder.mkdir()
        three_steps(folder)

    def start(folder):
        return subprocess.Popen([sys.executable, "-c", SEND, folder, uri], stderr=subprocess.PIPE, text=True)

    with start(folders[0]) as killed:
        while not any(file.stat().st_size > 2**16 for file in tmp_path.glob("new/*mlflow.db*") if file.is_file()):
            assert killed.poll() is None, killed.stderr.read()
            time.sleep(0.05)
        killed.kill()
    processes = [start(folder) for folder in folders]
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    assert len(mlflow.MlflowClient(uri).search_runs(["1"])) == 4
