"""MLflow's own server goes down during a run and comes back: nothing is missing or duplicated."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import mlflow
import psutil
import pytest

from rlzoo.journal.tracking.uploads import uploaded_to
from tests.faults.test_kill import KILLS
from tests.training.short import QUICK, lines

pytestmark = pytest.mark.skipif(
    KILLS <= 5, reason="in nox -s faults only: MLflow's server takes a quarter of a minute to start"
)


def serve(folder, port):
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--backend-store-uri",
        f"sqlite:///{folder}/server.db",
        "--workers",
        "1",
    ]
    command += ["--artifacts-destination", str(folder / "artifacts"), "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "server.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    until = time.monotonic() + 120
    while True:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return process
        assert process.poll() is None, (folder / "server.log").read_text()[-2000:]
        assert time.monotonic() < until
        time.sleep(0.2)


def stop(process):
    everyone = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for one in everyone:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()
    psutil.wait_procs(everyone, timeout=20)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("comes_back", ["during the run", "after the run"])
def test_a_server_that_restarts_receives_every_record_once(tmp_path, comes_back):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address, folder = f"http://127.0.0.1:{port}", tmp_path / "run"
    server = serve(tmp_path, port)
    settings = [word for setting in QUICK for word in ("--set", setting)]
    command = [sys.executable, "-m", "rlzoo", "train", "--clip", "fspo", "--steps", "150", "--output", str(folder), *settings]
    environment = os.environ | {"MLFLOW_TRACKING_URI": address, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as process:
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("step 20/"):
                process.send_signal(signal.SIGSTOP)  # while the server goes down or starts, which takes longer than steps
                stop(server)
                process.send_signal(signal.SIGCONT)
            if line.startswith("step 100/") and comes_back == "during the run":
                process.send_signal(signal.SIGSTOP)
                server = serve(tmp_path, port)
                process.send_signal(signal.SIGCONT)
        assert process.wait() == 0, "".join(said)[-3000:]
    text = "".join(said)
    assert "cannot be reached" in text
    if comes_back == "after the run":
        assert f"send the rest with: rlzoo sync {folder}" in text
        server = serve(tmp_path, port)
        subprocess.run([sys.executable, "-m", "rlzoo", "sync", str(folder)], check=True, env=environment)
    try:
        client = mlflow.MlflowClient(address)
        (found,) = uploaded_to(folder).values()
        rows = lines(folder / "metrics.jsonl")
        history = client.get_metric_history(found.run_id, "reward/mean")
        assert [(point.step, point.value) for point in history] == [(row["step"], row["reward/mean"]) for row in rows[1:]]
        assert client.get_run(found.run_id).info.status == "FINISHED"
        names = {item.path for item in client.list_artifacts(found.run_id)}
        assert {"config.yaml", "metrics.jsonl", "completions"} <= names
    finally:
        stop(server)
