"""`rlzoo ui`: starts MLflow's UI, by default reachable only from this machine."""

from __future__ import annotations

import importlib.metadata
import ipaddress
import os
import shlex
import socket
import sys
from contextlib import suppress
from typing import Annotated

import typer

from rlzoo.cli.options import loading
from rlzoo.config.redaction import redact
from rlzoo.core.errors import UserError

HOST = "127.0.0.1"
CHECKS_OFF = "MLFLOW_SERVER_DISABLE_SECURITY_MIDDLEWARE"
ANY_HOST = {"0.0.0.0": HOST, "::": "::1"}  # hosts that stand for all addresses, with an address that a browser can open


def ui(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 5000,
    host: Annotated[str, typer.Option(help="Address to listen on; whoever can reach it needs no password.")] = HOST,
) -> None:
    """Start MLflow's UI for the runs. By default, only this machine can reach it.

    The command prints the address of a saved view, which shows the rules of the latest experiment side by side.
    """
    with loading():
        from rlzoo.journal.tracking.store import is_missing, latest_experiment
        from rlzoo.journal.tracking.uploads import tracking_uri, without_password
        from rlzoo.journal.tracking.views import view_path
    uri = tracking_uri()
    if uri.startswith(("http://", "https://")):
        raise UserError(f"MLFLOW_TRACKING_URI points to a server, {redact(uri)}; open this address in a browser")
    if is_missing(uri):
        raise UserError(
            f"{without_password(uri)} does not exist: no run has been tracked here yet; train first (rlzoo train --clip fspo), "
            "or change to the folder that contains your runs"
        )
    if os.environ.get(CHECKS_OFF, "").lower() not in ("", "0", "false", "f", "no", "n", "off"):
        raise UserError(f"{CHECKS_OFF} is set, so MLflow would not check the host and origin of requests; unset it")
    is_local = host == "localhost"  # any other name may stand for any address
    with suppress(ValueError):
        is_local |= ipaddress.ip_address(host).is_loopback
    if not is_local:
        warning = f"anyone who reaches {host!r} can read, change and delete every run without a password"
        print(f"warning: {warning}; a tunnel (ssh -L) to {HOST} is safer", file=sys.stderr)
    name = ANY_HOST.get(host, host)
    with suppress(OSError), socket.create_connection((name, port), timeout=1):
        raise UserError(f"port {port} is taken; choose another with --port")
    print(f"Starting MLflow on {redact(uri)} (Ctrl-C stops it) ...", flush=True)
    # every user of this machine can read command lines, so pass the store in the environment
    quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_LOGGING_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
    environment = quiet | os.environ | {"MLFLOW_BACKEND_STORE_URI": uri}
    experiment = latest_experiment()
    address = f"http://{f'[{name}]' if ':' in name else name}:{port}"
    page = address if experiment is None else f"{address}{view_path(experiment)}"
    # by default, MLflow starts four workers and a job queue, each of which imports MLflow; a single user needs one worker
    command = [sys.executable, "-P", "-m", "mlflow", "server", "--host", host, "--port", str(port), "--workers", "1"]
    # by default, uvicorn imports the app from the working directory first
    folder = str(importlib.metadata.distribution("mlflow").locate_file("."))
    command += ["--uvicorn-opts", shlex.join(["--app-dir", folder, "--log-level", "error"])]
    print(f"In about ten seconds, open {page}", flush=True)
    os.execve(sys.executable, command, environment)  # the server needs none of the libraries imported here
