"""A store receives everything in a directory exactly once, regardless of what happened in between."""

import shutil

import mlflow
import pytest

from rlzoo.cli.sync import sync
from rlzoo.core.errors import UserError
from rlzoo.journal.tracking.description import NOTE
from rlzoo.journal.tracking.store import latest_experiment
from rlzoo.journal.tracking.sync import Sync
from rlzoo.journal.tracking.uploads import FOLDER, Upload, Uploaded, run_id_of, tracking_uri, without_password
from rlzoo.support.lock import Lock
from tests.journal.tracking.followed import add_row, end, history, send, store, told

THREE_STEPS = [(0, 0.0, 1000500), (1, 0.1, 1001500), (2, 0.2, 1002500)]


def test_everything_arrives(directory):
    end(directory, tags={**Upload.read(directory).tags, "warnings": "inert"})
    send(directory)
    run = store().get_run(run_id_of(directory))
    assert (run.info.status, run.info.run_name, run.info.end_time) == ("FINISHED", "mine", 2000000)
    assert run.data.params == {"clip.width": "1"}
    assert (run.data.tags["clip"], run.data.tags["warnings"], run.data.tags[NOTE]) == ("fspo", "inert", "**mine**")
    assert "git_commit" not in run.data.tags, "there is none"
    assert run.data.metrics == {"reward/mean": 0.2, "reward": 0.5}
    assert store().get_experiment(run.info.experiment_id).tags["mlflow.experimentKind"] == "custom_model_development"
    assert history(directory) == THREE_STEPS
    names = [item.path for item in store().list_artifacts(run.info.run_id)]
    assert names == ["completions", "config.yaml", "metrics.jsonl"]


def test_nothing_outside_the_directory_is_sent(directory):
    outside = directory.parent / "outside.html"
    outside.write_bytes(b"private")
    (directory / "figures" / "linked.html").symlink_to(outside)
    (directory / "linked.txt").symlink_to(outside)
    end(directory, files=("config.yaml", "../outside.html", str(outside), "linked.txt"))
    assert send(directory).num_files == 2  # config.yaml and the one valid page
    names = [item.path for item in store().list_artifacts(run_id_of(directory))]
    assert names == ["completions", "config.yaml"]


def test_a_second_upload_sends_nothing(directory):
    end(directory)
    first, second = send(directory), send(directory)
    assert (first.num_rows, first.num_files) == (3, 3)
    assert (second.num_rows, second.num_files) == (0, 0)
    assert history(directory) == THREE_STEPS
    assert history(directory, "reward") == [(2, 0.5, 2000000)]


@pytest.mark.parametrize("known", ["nothing", "the run"])
def test_uploads_that_were_not_recorded_are_not_sent_twice(directory, known):
    send(directory, is_over=False)
    run_id = run_id_of(directory)
    if known == "nothing":
        (directory / "tracking" / "sent.json").unlink()
    else:
        Uploaded(Upload.read(directory).id, run_id).write(directory, tracking_uri())
    add_row(directory, 3)
    assert send(directory).num_rows == 1  # a store that keeps every point would show the others twice
    assert run_id_of(directory) == run_id
    assert history(directory) == [*THREE_STEPS, (3, 0.3, 1003500)]
    assert len(store().search_runs([store().get_experiment_by_name("tests").experiment_id])) == 1


@pytest.mark.parametrize("known", ["all", "nothing"])
def test_a_description_that_a_user_edited_is_kept(directory, known):
    send(directory, is_over=False)
    store().set_tag(run_id_of(directory), NOTE, "my conclusion")
    if known == "nothing":
        (directory / "tracking" / "sent.json").unlink()
    end(directory)
    send(directory)
    assert told(directory).data.tags[NOTE] == "my conclusion"


def test_an_incomplete_line_is_sent_once_it_is_complete(directory):
    sync = send(directory, is_over=False)
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward')
        file.flush()
        sync.send(is_over=False)
        file.write('/mean": 0.3, "time/clock": 1003.5}\n')
        file.flush()
    sync.send(is_over=False)
    assert history(directory) == [*THREE_STEPS, (3, 0.3, 1003500)]


def test_a_resumed_run_keeps_its_mlflow_run(directory):
    end(directory)
    send(directory)
    end(directory, status="RUNNING", ended=None, step=0, metrics={})
    add_row(directory, 3)
    going_on = send(directory, is_over=False)
    assert store().get_run(going_on.uploaded.run_id).info.status == "RUNNING"
    end(directory, step=3)
    going_on.send(is_over=True)
    assert store().get_run(going_on.uploaded.run_id).info.status == "FINISHED"
    assert [point[0] for point in history(directory)] == [0, 1, 2, 3]
    assert [point[0] for point in history(directory, "reward")] == [2, 3]


def test_repeated_steps_are_not_shown_twice(directory):
    send(directory, is_over=False)
    rows = (directory / "metrics.jsonl").read_text().splitlines()[:2]  # like a run that resumes from step 1
    (directory / "metrics.jsonl").write_text("".join(f"{row}\n" for row in rows))
    for step in (2, 3):
        add_row(directory, step)
    send(directory)
    assert [point[0] for point in history(directory)] == [0, 1, 2, 3]


def test_a_run_without_a_process_is_marked_as_killed(directory):
    send(directory)
    assert store().get_run(run_id_of(directory)).info.status == "KILLED"


def test_syncing_a_live_run_does_not_end_it(directory):
    lock = Lock(directory)
    sync([directory])  # raises if MLflow did not get everything
    assert store().get_run(run_id_of(directory)).info.status == "RUNNING"
    lock.release()
    sync([directory])  # raises if MLflow did not get everything
    assert store().get_run(run_id_of(directory)).info.status == "KILLED"


def test_more_metrics_than_one_call_takes(directory):
    for step in range(3, 50):
        add_row(directory, step, **{f"many/{number}": float(number) for number in range(60)})
    send(directory)
    assert [point[0] for point in history(directory)] == list(range(50))
    assert [point[0] for point in history(directory, "many/59")] == list(range(3, 50))


def test_an_interrupted_upload_is_completed_later(directory, monkeypatch):
    whole, calls = mlflow.MlflowClient.log_batch, []

    def fails(self, run_id, metrics=(), **others):
        calls.append(metrics)
        if len(calls) in (2, 4):
            raise mlflow.MlflowException("no space left")
        whole(self, run_id, metrics=metrics, **others)

    for step in range(3, 50):
        add_row(directory, step, **{f"many/{number}": float(number) for number in range(60)})
    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", fails)
    sync, failures = Sync(directory, tracking_uri()), 0
    for _ in range(3):
        try:
            sync.send(is_over=True)
        except mlflow.MlflowException:
            failures += 1
    assert failures == 2
    assert [point[0] for point in history(directory)] == list(range(50))


@pytest.mark.long
def test_an_unwritable_store_is_an_error_and_a_missing_store_is_created(directory, tmp_path, monkeypatch):
    # a location that nobody can write to
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:////proc/{tmp_path.name}/mlflow.db")
    with pytest.raises(Exception, match=r"unable to open database|No such file|nonexistent"):
        send(directory)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/there.db")
    send(directory)
    assert history(directory) == THREE_STEPS


def test_every_store_receives_all_records(directory, empty_store, tmp_path, monkeypatch):
    send(directory)
    first = run_id_of(directory)
    shutil.copy(empty_store, tmp_path / "other.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/other.db")
    assert send(directory).num_rows == 3
    assert run_id_of(directory) != first
    assert history(directory) == THREE_STEPS


def test_a_password_is_not_stored(directory):
    assert without_password("https://me:secret@host:5000/path") == "https://host:5000/path"
    Uploaded("id", "run").write(directory, "https://me:secret@host:5000")
    assert "secret" not in (directory / "tracking" / "sent.json").read_text()
    assert Uploaded.read(directory, "https://me:other@host:5000").run_id is None, "of another record"


def test_damaged_records_are_reported(tmp_path):
    Upload.new("mine", "run", tags={}, params={}).write(tmp_path)
    file = tmp_path / FOLDER / "record.json"
    for content in (b"{", b"[1]", b'{"id": 1}', b"\xff"):
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"record.json' (cannot be read|is not valid)"):
            Upload.read(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b'{"sqlite:///x.db": {"id": 3}}'])
def test_a_damaged_upload_record_is_harmless(directory, content):
    run_id = send(directory, is_over=False).uploaded.run_id
    (directory / FOLDER / "sent.json").write_bytes(content)
    assert run_id_of(directory) is None
    add_row(directory, 3)
    assert send(directory).num_rows == 1
    assert run_id_of(directory) == run_id
    assert history(directory) == [*THREE_STEPS, (3, 0.3, 1003500)]


def test_the_environment_sets_store_and_experiment(directory, empty_store, tmp_path, monkeypatch):
    shutil.copy(empty_store, tmp_path / "named.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/named.db")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "named")
    Upload.new("rlzoo", "mine", tags={}, params={}).write(directory)
    send(directory)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/named.db")
    assert told(directory).info.experiment_id == client.get_experiment_by_name("named").experiment_id
    assert client.get_experiment_by_name("rlzoo") is None


def test_an_experiment_id_in_the_environment_takes_precedence(directory, monkeypatch):
    first, second = (store().create_experiment(name) for name in ("first", "second"))
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "named")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", second)
    Upload.new("rlzoo", "mine", tags={}, params={}).write(directory)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_ID")  # `rlzoo sync` in another shell
    send(directory)
    assert told(directory).info.experiment_id == second
    assert store().get_experiment_by_name("named") is store().get_experiment_by_name("rlzoo") is None
    store().create_run(first)  # newer than the other runs
    assert latest_experiment() == first
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", second)
    assert latest_experiment() == second


@pytest.mark.parametrize("wrong", ["4711", "mine", "deleted"])
def test_an_experiment_id_that_the_store_does_not_have_is_one_line(directory, monkeypatch, wrong):
    if wrong == "deleted":
        wrong = store().create_experiment("deleted")
        store().delete_experiment(wrong)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", wrong)
    Upload.new("rlzoo", "mine", tags={}, params={}).write(directory)
    with pytest.raises(UserError, match=f"^MLFLOW_EXPERIMENT_ID={wrong}: the store has no such active experiment"):
        send(directory)


def test_an_experiment_id_belongs_to_the_store_of_the_run(directory, empty_store, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", store().create_experiment("ours"))
    Upload.new("rlzoo", "mine", tags={}, params={}).write(directory)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_ID")
    shutil.copy(empty_store, tmp_path / "other.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/other.db")
    store().create_experiment("theirs")  # has the same ID in the other store
    send(directory)
    assert told(directory).info.experiment_id == store().get_experiment_by_name("rlzoo").experiment_id
