"""MLflow's UI is only reachable from this machine unless configured otherwise, and its own checks stay on."""

import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest
from mlflow import MlflowClient

from rlzoo.cli import ui
from rlzoo.journal.tracking.store import experiment_id
from rlzoo.journal.tracking.views import KEY, NAME, view_path, write_view
from tests.poison import poison, poisoned

COMMAND = [Path(sys.executable).with_name("rlzoo")]
PORT = "5987"


def answer(path, host=f"127.0.0.1:{PORT}", method="GET", **headers):
    """Send one request with the given host name to the server; returns the status and body of the response."""
    body = b"{}" if method == "POST" else None
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", body, {"Host": host, **headers}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=5) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


@pytest.fixture(scope="module")
def server(tmp_path_factory, empty_store):
    """`rlzoo ui` on its own store, once it responds."""
    folder = tmp_path_factory.mktemp("ui")
    shutil.copy(empty_store, folder / "mlflow.db")
    poison(folder)
    environment = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"}
    with (folder / "screen").open("w") as screen:
        process = subprocess.Popen(
            [*COMMAND, "ui", "--port", PORT], cwd=folder, env=environment, stdout=screen, stderr=screen, start_new_session=True
        )
    process.screen = folder / "screen"
    try:
        deadline = time.monotonic() + 240
        while True:
            try:
                assert answer("/health") == (200, b"OK")
                break
            except OSError:
                assert time.monotonic() < deadline, "MLflow's server did not come up"
                assert process.poll() is None, "MLflow's server ended"
                time.sleep(0.5)
        yield process
        assert poisoned(folder) == []
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.long
def test_ui_serves_the_store_on_loopback_only(server):
    listening = Path("/proc/net/tcp").read_text()
    assert f"0100007F:{int(PORT):04X} 00000000:0000 0A" in listening  # 127.0.0.1, LISTEN
    assert f"00000000:{int(PORT):04X} 00000000:0000 0A" not in listening


@pytest.mark.long
def test_mlflow_rejects_foreign_host_headers(server):
    path = "/api/2.0/mlflow/experiments/get?experiment_id=0"
    assert answer(path)[0] == 200
    status, body = answer(path, host="evil.example")  # an attacker can make this name resolve to this machine
    assert (status, b"Invalid Host header" in body) == (403, True)


@pytest.mark.long
def test_another_sites_page_cannot_change_the_store(server):
    path, kind = "/api/2.0/mlflow/experiments/search", {"Content-Type": "application/json"}
    assert answer(path, method="POST", Origin=f"http://127.0.0.1:{PORT}", **kind)[0] != 403
    status, body = answer(path, method="POST", Origin="http://evil.example", **kind)
    assert (status, b"Cross-origin request blocked" in body) == (403, True)


@pytest.mark.long
def test_the_store_address_is_not_on_a_command_line(server):
    assert b"mlflow" in Path(f"/proc/{server.pid}/cmdline").read_bytes()
    group = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit() and in_group(entry, server.pid)]
    assert group
    assert not [entry for entry in group if b"sqlite" in (entry / "cmdline").read_bytes()]


@pytest.mark.long
def test_the_first_lines_of_output_show_the_store_and_the_address(server):
    answer("/api/2.0/mlflow/experiments/get?experiment_id=0")
    assert server.screen.read_text().splitlines()[:2] == [
        f"Starting MLflow on sqlite:///{server.screen.parent}/mlflow.db (Ctrl-C stops it) ...",
        f"In about ten seconds, open http://127.0.0.1:{PORT}",  # the store has no runs
    ]


def in_group(process, group):
    try:
        return os.getpgid(int(process.name)) == group
    except ProcessLookupError:
        return False


class Started(Exception):  # noqa: N818
    """Raised instead of starting the server."""


@pytest.fixture(autouse=True)
def stays(monkeypatch):
    """Raise an exception instead of starting the server, which would replace the tests' own process."""

    def execute(program, command, environment):
        raise Started(command, environment)

    monkeypatch.setattr(os, "execve", execute)


@pytest.fixture
def started(capsys):
    """Start the UI; returns the command that would run, with its environment. ``page`` is the address that was printed."""

    def run(host, **options):
        with pytest.raises(Started) as start:
            ui.ui(5986, host, **options)
        command, environment = start.value.args
        assert command[1:4] == ["-P", "-m", "mlflow"]
        run.said = capsys.readouterr()
        run.page = run.said.out.splitlines()[-1].removeprefix("In about ten seconds, open ")
        return command[4:], environment

    return run


def test_the_job_queue_of_mlflow_is_off_by_default(started, monkeypatch):
    assert started("127.0.0.1")[1]["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] == "false"
    monkeypatch.setenv("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "true")
    assert started("127.0.0.1")[1]["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] == "true"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "localhost", "::1"])
def test_every_loopback_name_is_accepted(started, host):
    if ":" in host and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    command, _ = started(host)
    assert command[:-1] == ["server", "--host", host, "--port", "5986", "--workers", "1", "--uvicorn-opts"]
    assert command[-1].startswith("--app-dir ")
    assert command[-1].endswith(" --log-level error")
    assert re.match(r"Starting MLflow on sqlite:///.* \(Ctrl-C stops it\) \.\.\.\n", started.said.out)
    assert (started.said.err, started.page) == ("", f"http://{'[::1]' if host == '::1' else host}:5986")


REMOTE = ["0.0.0.0", "::", "", "192.0.2.1", "fe80::1", "mine.example"]


@pytest.mark.parametrize("host", REMOTE)
def test_a_server_on_a_public_address_warns(started, host):
    command, environment = started(host)
    if host == "0.0.0.0":
        assert started.page == "http://127.0.0.1:5986"  # which a browser can open
    assert command[:5] == ["server", "--host", host, "--port", "5986"]
    assert f"warning: anyone who reaches {host!r} can read, change and delete every run" in started.said.err
    assert "MLFLOW_SERVER_DISABLE_SECURITY_MIDDLEWARE" not in environment


def test_a_password_in_the_store_address_is_neither_shown_nor_on_a_command_line(started, monkeypatch, own_store):
    address = f"sqlite:///file:{own_store}/mlflow.db?uri=true&password=hunter2"  # SQLite ignores unknown parameters
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    command, environment = started("127.0.0.1")
    assert "hunter2" not in " ".join([*command, *started.said])
    assert environment["MLFLOW_BACKEND_STORE_URI"] == address


@pytest.mark.parametrize("kind", ["damaged", "of another version"])
def test_an_unusable_store_is_reported_in_one_line_and_no_server_starts(rlzoo, own_store, kind):
    if kind == "damaged":
        (own_store / "mlflow.db").write_text("not a database\n" * 100)
    else:
        with closing(sqlite3.connect(own_store / "mlflow.db")) as store:
            store.execute("UPDATE alembic_version SET version_num = '0123456789ab'")
            store.commit()
    code, _, err = rlzoo("ui", "--port", "5986")
    assert code == 1
    assert err.startswith("rlzoo: MLflow at sqlite:///")
    assert err.count("\n") == 1


def test_without_a_store_ui_says_how_to_train_and_creates_none(refused, monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/none/mlflow.db")
    assert "no run has been tracked here yet; train first (rlzoo train --clip fspo)" in refused("ui")
    assert not (tmp_path / "none").exists()


def test_the_address_opens_the_saved_view_of_the_newest_run(started, own_store):
    client = MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    for name in ("old", "new"):
        client.create_run(experiment_id(client, name))
    started("127.0.0.1")
    newest = client.get_experiment_by_name("new")
    assert started.page == f"http://127.0.0.1:5986{view_path(newest.experiment_id)}"
    assert json.loads(newest.tags[f"mlflow.sharedViewState.{KEY}"])["name"] == NAME


def test_a_view_that_somebody_changed_is_kept(own_store):
    client = MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    experiment = experiment_id(client, "mine")
    client.set_experiment_tag(experiment, f"mlflow.sharedViewState.{KEY}", "changed")
    write_view(client, experiment)
    assert client.get_experiment(experiment).tags[f"mlflow.sharedViewState.{KEY}"] == "changed"


def test_a_server_is_opened_in_a_browser(refused, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hunter2@host:5000")
    said = "MLFLOW_TRACKING_URI points to a server, http://<redacted>@host:5000; open this address in a browser"
    assert refused("ui") == said


def test_ui_reports_a_port_that_is_in_use(refused):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert refused("ui", "--port", str(port)) == f"port {port} is taken; choose another with --port"
