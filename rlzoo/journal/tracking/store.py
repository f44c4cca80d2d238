"""Connects to an MLflow store, with time limits in case the store is slow or is not an MLflow server."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlzoo.config.redaction import redact
from rlzoo.core.errors import RunError, UserError, one_line
from rlzoo.journal.tracking.uploads import EXPERIMENT_ID, tracking_uri, without_password
from rlzoo.journal.tracking.views import write_view
from rlzoo.support.atomic import temporary_path
from rlzoo.support.lock import Lock

logger = logging.getLogger("rlzoo")

LONGEST_SETUP = 120.0  # maximum wait in seconds for a process that connects to a SQLite store; creating the tables takes 10 s
OBJECT_STORES = ("s3", "gs", "wasbs")  # schemes of artifact locations that name neither a host nor a path

KIND = "mlflow.experimentKind"  # tag that makes MLflow's pages show runs and models instead of traces and judges

_DEFAULTS = {
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",  # otherwise, a new store logs every table, and a failing store logs a traceback
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # the default retries take minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}


def load_mlflow() -> None:
    """Import MLflow with short time limits for a server's replies."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    import mlflow  # noqa: F401


def experiment_id(client: Any, name: str, chosen: str | None = None) -> str:
    """Return the ID of the experiment with this name. If there is none, create the experiment with its saved view.

    An ID from `EXPERIMENT_ID` (``chosen``) takes precedence. Raises `UserError` if no active experiment has this ID.
    """
    from mlflow import MlflowException

    if chosen:
        try:
            if client.get_experiment(chosen).lifecycle_stage == "active":
                return chosen
        except MlflowException as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise  # the store cannot be reached
        raise UserError(f"{EXPERIMENT_ID}={chosen}: the store has no such active experiment; set the ID of an existing one")
    if experiment := client.get_experiment_by_name(name):
        entry = str(experiment.experiment_id)
        if experiment.lifecycle_stage != "active":
            raise RunError(f"experiment {name!r} was deleted; restore it with: mlflow experiments restore -x {entry}")
        return entry
    try:
        entry = str(client.create_experiment(name, tags={KIND: "custom_model_development"}))
    except MlflowException:  # another run created the experiment in the meantime
        if experiment := client.get_experiment_by_name(name):
            return str(experiment.experiment_id)
        raise
    write_view(client, entry)
    return entry


def latest_experiment() -> str | None:
    """Add the view to experiment `EXPERIMENT_ID`, or by default the one with the newest run. Return its ID, or None."""
    with connected() as client:
        experiments = client.search_experiments(order_by=["last_update_time DESC"])
        ids = [experiment.experiment_id for experiment in experiments if experiment.experiment_id != "0"]  # MLflow's "Default"
        if not ids:
            return None
        runs = client.search_runs(ids, max_results=1)  # sorted with the newest first
        newest = runs[0].info.experiment_id if runs else ids[0]
        latest = os.environ.get(EXPERIMENT_ID) or str(newest)
        with suppress(Exception):  # the store may be read-only
            write_view(client, latest)
        return latest


def is_missing(uri: str) -> bool:
    """Whether the store is a SQLite file that does not exist. Connecting to such a store would create the file."""
    file = _sqlite_file(uri)
    return file is not None and not file.exists()


def _sqlite_file(uri: str) -> Path | None:
    name = uri.removeprefix("sqlite:///").partition("?")[0]
    return None if name == uri or name.startswith((":", "file:")) or not name else Path(name).resolve()


def find_run(client: Any, run_id: str) -> Any:
    """Return a run, or None if the store does not have it. A deleted run is returned too, because it can be restored."""
    from mlflow import MlflowException

    try:
        return client.get_run(run_id)
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
        return None


@contextmanager
def connected(otherwise: str = "") -> Iterator[Any]:
    """Yield a client for the current store. An error is logged with ``otherwise`` or, if that is empty, raised as one line."""
    uri = tracking_uri()
    try:
        yield connect(uri)
    except Exception as error:
        problem = f"MLflow at {without_password(uri)} cannot be used ({describe(error, uri)})"
        if not otherwise:
            raise error if isinstance(error, UserError) else RunError(problem) from error
        logger.warning("%s; %s", problem, otherwise)


def connect(uri: str) -> Any:
    """Return an MLflow client. A lock and a temporary name protect a SQLite store while MLflow creates or upgrades tables."""
    load_mlflow()
    from mlflow import MlflowClient

    file = _sqlite_file(uri)
    if file is None:
        return MlflowClient(uri)
    with ExitStack() as stack:
        with suppress(OSError):  # the folder may be read-only
            beside = file.with_name(f".{file.name}.lock")
            beside.mkdir(parents=True, exist_ok=True)
            stack.callback(Lock(beside, LONGEST_SETUP).release)
        if not file.exists():
            new = temporary_path(file, "new")
            new.unlink(missing_ok=True)
            MlflowClient(f"sqlite:///{new}")
            new.rename(file)
        with closing(sqlite3.connect(file, timeout=20)) as store:  # MLflow retries for 100 s if the file is not a database
            store.execute("SELECT 1 FROM sqlite_master")
        return MlflowClient(uri)


def artifact_repository(location: str, uri: str) -> Any:
    """Return MLflow's repository for a store's artifact location. A server must not name a path or another host."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    place, server = urlsplit(location), urlsplit(uri)
    is_own = place.scheme in ("mlflow-artifacts", server.scheme) and place.netloc in ("", server.netloc.rpartition("@")[2])
    if server.scheme in ("http", "https") and not is_own and place.scheme not in OBJECT_STORES:
        raise RunError(f"no files are sent to {redact(location)[:200]!r}; start the server with --serve-artifacts")
    return get_artifact_repository(location, tracking_uri=uri)


def describe(error: Exception, uri: str) -> str:
    """Format an error from the store as one line, without passwords."""
    text = redact(one_line(" ".join(str(error).replace(uri, without_password(uri)).split())))
    kind = "" if isinstance(error, UserError | RunError) else f"{type(error).__name__}: "
    return f"{kind}{text if len(text) <= 300 else f'{text[:296]} ...'}".rstrip(": ")
