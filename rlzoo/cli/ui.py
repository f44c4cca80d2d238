"""`rlzoo ui`: MLflow's own UI on our store, for this machine only."""

from __future__ import annotations

import os
import socket
import sys

from rlzoo.errors import UserError
from rlzoo.tracking.record import tracking_uri

HOST = "127.0.0.1"


def serve(port: int) -> None:
    """Become MLflow's server; it ends with Ctrl-C."""
    uri = tracking_uri()
    if uri.startswith(("http://", "https://")):
        raise UserError(f"MLFLOW_TRACKING_URI is the server {uri}: open it in a browser")
    with socket.socket() as probe:
        if probe.connect_ex((HOST, port)) == 0:
            raise UserError(f"port {port} is taken; choose another with --port")
    print(f"http://{HOST}:{port} on {uri} (Ctrl-C ends it)", flush=True)
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri, "--host", HOST, "--port", str(port)]
    os.execv(sys.executable, command)
