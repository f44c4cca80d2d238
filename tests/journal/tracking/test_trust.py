"""Credentials go only to an address that the user configured, and a server's answer never becomes a path of this machine."""

import json
import shutil
import threading
from base64 import b64encode
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import typer

from rlzoo.cli.sync import sync
from rlzoo.core.errors import RunError, UserError
from rlzoo.journal.tracking.store import artifact_repository
from rlzoo.journal.tracking.uploads import Upload, Uploaded, tracking_uri
from tests.journal.tracking.followed import end, send

EXPERIMENT = {"experiment_id": "1", "name": "tests", "lifecycle_stage": "active"}


@contextmanager
def tracking_server(location="mlflow-artifacts:/1/run/artifacts"):
    """A tracking server that names a location for files; yields its address and the (method, path, credentials) it received."""
    received = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            received.append((self.command, self.path.partition("?")[0], self.headers.get("Authorization")))
            info = {"run_id": "a" * 32, "experiment_id": "1", "status": "RUNNING", "lifecycle_stage": "active"}
            run = {"info": {**info, "artifact_uri": location}, "data": {}, "inputs": {}}
            body = json.dumps({"experiment": EXPERIMENT, "run": run, "run_info": run["info"], "runs": []}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PUT = answer  # noqa: N815

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def password(monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "ada")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "lovelace")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    monkeypatch.chdir(tmp_path)
    return f"Basic {b64encode(b'ada:lovelace').decode()}"


def test_credentials_are_not_sent_to_an_address_from_a_run_directory(directory, password, monkeypatch, capsys):
    with tracking_server() as (address, received):
        Uploaded(Upload.read(directory).id, "a" * 32).write(directory, address)
        with pytest.raises(typer.Exit):
            sync([directory])
        assert capsys.readouterr().out.endswith(f"credentials, set MLFLOW_TRACKING_URI={address}\n")
        assert received == []
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)  # confirms the address
        sync([directory])
        assert {credentials for _, _, credentials in received} == {password}
        uploads = {path.rpartition("/artifacts/")[2] for method, path, _ in received if method == "PUT"}
        assert {"config.yaml", "metrics.jsonl", "completions/step-2.html"} <= uploads


def test_a_run_directory_does_not_choose_the_database(directory, password, tmp_path):
    theirs = tmp_path / "theirs" / "mlflow.db"
    Uploaded(Upload.read(directory).id, "a" * 32).write(directory, f"sqlite:///{theirs}")
    with pytest.raises(typer.Exit):
        sync([directory])
    assert not theirs.parent.exists()


def test_sync_goes_on_after_entries_that_it_skips(directory, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page, plain, theirs, damaged = (tmp_path / name for name in ("compare.html", "plain", "theirs", "damaged"))
    page.touch()
    plain.mkdir()
    shutil.copytree(directory, theirs)
    shutil.copytree(directory, damaged)
    (damaged / "tracking" / "record.json").write_text("{")
    Uploaded(Upload.read(theirs).id, "a" * 32).write(theirs, "http://elsewhere")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    with pytest.raises(typer.Exit):
        sync([page, plain, theirs, damaged, directory])
    refused, failed, sent = capsys.readouterr().out.splitlines()
    assert refused.startswith(f"{theirs}: not sent, because its store is 'http://elsewhere'")
    assert "record.json' cannot be read: " in failed
    assert " steps and " in sent
    with pytest.raises(UserError, match="is not the directory of a tracked run"):
        sync([page, plain])


@pytest.mark.parametrize("form", ["{path}", "file://{path}", "file:{path}", "//host{path}", "runs:/../..{path}"])
def test_a_server_cannot_choose_a_local_path(directory, tmp_path, monkeypatch, caplog, form):
    mine = tmp_path / "mine" / "config.yaml"
    mine.parent.mkdir()
    mine.write_text("precious\n")
    with tracking_server(form.format(path=mine.parent)) as (address, received):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        end(directory)
        assert send(directory).num_rows == 3
        paths = [path for _, path, _ in received]
    assert mine.read_text() == "precious\n"
    assert [file.name for file in mine.parent.iterdir()] == ["config.yaml"]
    assert paths[-1].endswith("/runs/update")  # the metrics and the status are sent nevertheless
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith("MLflow: no files are sent to ")


@pytest.mark.parametrize("scheme", ["http", "mlflow-artifacts"])
def test_credentials_do_not_follow_files_to_another_host(directory, password, monkeypatch, scheme):
    with (
        tracking_server() as (other, stolen),
        tracking_server(f"{scheme}{other.removeprefix('http')}/x") as (address, received),
    ):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        send(directory)
    assert stolen == []
    assert {credentials for _, _, credentials in received} == {password}


@pytest.mark.parametrize(
    ("location", "is_allowed"),
    [
        ("mlflow-artifacts:/1/a", True),
        ("mlflow-artifacts://host:5000/1/a", True),
        ("https://host:5000/api/2.0/mlflow-artifacts/artifacts/1/a", True),
        ("s3://bucket/1/a", True),
        ("http://host:5000/1/a", False),  # not encrypted
        ("https://host:5001/1/a", False),
        ("sftp://host/1/a", False),
        ("", False),
    ],
)
def test_files_go_to_the_server_itself_or_to_an_object_store(location, is_allowed):
    if is_allowed:
        assert artifact_repository(location, "https://me:secret@host:5000") is not None
    else:
        with pytest.raises(RunError, match="start the server with --serve-artifacts"):
            artifact_repository(location, "https://me:secret@host:5000")


def test_files_of_a_local_database_stay_in_its_artifact_folder(tmp_path):
    assert artifact_repository(str(tmp_path / "artifacts"), tracking_uri()).artifact_dir == str(tmp_path / "artifacts")
