"""Connects to an MLflow store, with limits in case the store is slow, sends endless replies, or is not an MLflow server."""

from __future__ import annotations

import os
import resource
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from rlzoo.config.run_config import SAME_CONTEST
from rlzoo.errors import RunError, UserError
from rlzoo.journal.tracking.record import EXPERIMENT_ID, tracking_uri, without_password
from rlzoo.journal.tracking.views import FILTER, write_view
from rlzoo.support.atomic import temporary_path
from rlzoo.support.lock import Lock
from rlzoo.support.redaction import redact
from rlzoo.support.replies import bounded_replies

LARGEST_REPLY = 16 * 2**20
"""Maximum size of a reply in bytes. The largest reply, the history of a metric, has about 90 bytes per step."""

LONGEST_REPLY = 60.0  # maximum duration of a reply in seconds

SPARE_MEMORY = 2**30
"""Number of bytes that the process may allocate beyond its current memory: a compressed reply can expand a thousandfold."""

LONGEST_SETUP = 120.0  # maximum seconds to wait for another process that connects to a SQLite store; new tables take 10 s
LONGEST_ERROR = 10_000  # characters
IN_MEMORY = ("sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite://:memory:")
SERVERS = ("http://", "https://")

OBJECT_STORES = ("s3", "gs", "wasbs")
"""Schemes of artifact locations that a server may name: a location names a bucket, but neither a host nor a path."""
MORE_SCHEMES = "MLFLOW_ALLOWED_HOST_ADDRESSED_ARTIFACT_SCHEMES"  # MLflow's environment variable for schemes such as abfss

KIND = "mlflow.experimentKind"  # tag that makes MLflow's pages show runs and models instead of traces and judges

_DEFAULTS = {
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",  # otherwise a new store logs every table, and a failing store logs a traceback
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # the default retries take minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}


class StoreError(RunError):
    """Raised when a store cannot be used; the message names the store and the cause."""


@contextmanager
def bounded_store() -> Iterator[None]:
    """Limit the time and size of the store's replies, and the memory of this process, within the block."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    import mlflow  # noqa: F401  (the limit does not include MLflow's own memory)

    former, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = psutil.Process().memory_info().data + SPARE_MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (limit if former == resource.RLIM_INFINITY else min(limit, former), most))
    try:
        with bounded_replies(LARGEST_REPLY, LONGEST_REPLY):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (former, most))


def experiment_id(client: Any, name: str, chosen: str | None = None) -> str:
    """Return the ID of the experiment with this name, which is created with its saved view if there is none.

    An ID from `EXPERIMENT_ID` (``chosen``) takes precedence; raises `UserError` if no active experiment has this ID.
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
    found = client.get_experiment_by_name(name)
    if found and found.lifecycle_stage != "active":
        how = f"mlflow experiments restore --experiment-id {found.experiment_id}"
        raise StoreError(f"experiment {name!r} was deleted in MLflow; set {EXPERIMENT_ID} to another, or restore it with: {how}")
    if found:
        return str(found.experiment_id)
    try:
        made = str(client.create_experiment(name, tags={KIND: "custom_model_development"}))
    except MlflowException:  # another run created the experiment in the meantime
        if found := client.get_experiment_by_name(name):
            return str(found.experiment_id)
        raise
    write_view(client, made)
    return made


def latest_experiment() -> str | None:
    """Return the ID from `EXPERIMENT_ID`, or of the experiment with the newest run, adding a missing view; None if empty."""
    with connected() as client:
        found = client.search_experiments(order_by=["last_update_time DESC"])
        own = [experiment for experiment in found if experiment.experiment_id != "0"]  # 0 is MLflow's "Default"
        runs = client.search_runs([experiment.experiment_id for experiment in own], max_results=1) if own else []
        if not own:
            return None
        newest = runs[0].info.experiment_id if runs else own[0].experiment_id  # runs are sorted newest first
        latest = os.environ.get(EXPERIMENT_ID) or str(newest)
        with suppress(Exception):  # a read-only store
            write_view(client, latest)
        return latest


def differing_settings(experiment: str) -> list[str]:
    """Return the settings in `SAME_CONTEST` that differ between the runs of the saved view; at most 1,000 runs are read.

    The saved view averages all runs of a rule, so its charts do not allow a comparison of rules if these settings differ.
    """
    with connected() as client:
        runs = client.search_runs([experiment], FILTER, max_results=1000)
    settings = [run.data.params for run in runs if "steps" in run.data.params]  # other runs are evaluations
    keys = {key for params in settings for key in params if key.startswith(SAME_CONTEST)}
    return sorted(key for key in keys if len({params.get(key) for params in settings}) > 1)


def is_missing(uri: str) -> bool:
    """Whether the store is a SQLite file that does not exist. Connecting to such a store would create the file."""
    file = _sqlite_file(uri)
    return file is not None and not file.exists()


def _sqlite_file(uri: str) -> Path | None:
    name = uri.removeprefix("sqlite:///").partition("?")[0]
    return None if name == uri or name.startswith((":", "file:")) or not name else Path(name)


def open_parent(experiment: str, run_name: str, tags: Mapping[str, str], former: str | None = None) -> str:
    """Return the ID of an MLflow run under which other runs will be nested: ``former`` if the store has it, or a new run."""
    with connected() as client:
        from mlflow import MlflowException

        with suppress(MlflowException):  # if the store is down, the next call raises an error
            if former is not None and client.get_run(former).info.lifecycle_stage == "active":
                return former
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or experiment
        entry = experiment_id(client, name, os.environ.get(EXPERIMENT_ID))
        return str(client.create_run(entry, run_name=run_name, tags=dict(tags)).info.run_id)


@contextmanager
def connected() -> Iterator[Any]:
    """Yield an MLflow client for the current store, with the limits of `bounded_store`.

    Raises:
        StoreError: any error in the block, because MLflow and its drivers have no common class of errors.
    """
    uri = tracking_uri()
    try:
        with bounded_store():
            yield connect(uri)
    except UserError:
        raise
    except Exception as error:
        raise StoreError(f"MLflow at {without_password(uri)} cannot be used ({describe(error, uri)})") from error


def connect(uri: str) -> Any:
    """Return an MLflow client; only one process at a time connects to a SQLite store, since that may create or upgrade tables.

    A new store appears when it is complete: MLflow cannot open a store whose creation was interrupted.
    """
    if uri in IN_MEMORY:
        raise UserError(f"{uri!r} is an in-memory database, which ends with the process; use a file, such as sqlite:///mlflow.db")
    from mlflow import MlflowClient

    file = _sqlite_file(uri)
    if file is None:
        return MlflowClient(uri)
    with ExitStack() as stack:
        beside = file.with_name(f".{file.name}.lock")
        with suppress(OSError):  # a read-only folder
            file.parent.mkdir(parents=True, exist_ok=True)
            beside.touch()
            stack.callback(Lock(beside, LONGEST_SETUP).release)
        if not file.exists():
            new = temporary_path(file, "new").absolute()
            new.unlink(missing_ok=True)
            MlflowClient(f"sqlite:///{new}")
            new.rename(file)
        with closing(sqlite3.connect(file, timeout=20)) as store:  # MLflow retries for 100 s if the file is no database
            store.execute("SELECT 1 FROM sqlite_master")
        return MlflowClient(uri)


def artifact_repository(location: str, uri: str) -> Any:
    """Return MLflow's access to the artifact location that the store at ``uri`` named.

    A server could otherwise name a path of this machine, whose files would be overwritten, or another host, which would receive
    the credentials. MLflow's own client queries the location in every call, so a check before the call would not suffice.

    Raises:
        StoreError: a server named a location that is neither on the server nor in an object store.
    """
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    place, server = urlsplit(location), urlsplit(uri)
    is_own = place.scheme == "mlflow-artifacts" and not place.netloc
    is_own |= place.scheme in ("mlflow-artifacts", server.scheme) and place.netloc == server.netloc.rpartition("@")[2]
    more = {scheme.strip() for scheme in os.environ.get(MORE_SCHEMES, "").split(",")} - {"", "file"}
    if uri.startswith(SERVERS) and not is_own and place.scheme not in more.union(OBJECT_STORES):
        raise StoreError(
            f"the server keeps files at {redact(location)[:200]!r}, which is neither on the server nor in an object store, so no "
            f"files are sent; start the server with --serve-artifacts, or add the scheme of a remote location to {MORE_SCHEMES}"
        )
    return get_artifact_repository(location, tracking_uri=uri)


def describe(error: Exception, uri: str) -> str:
    """Format an error from the store as one line, without passwords."""
    text = str(error)[:LONGEST_ERROR].replace(uri, without_password(uri))  # a reply can be megabytes long
    printable = "".join(char if char.isprintable() else " " for char in text)  # and contain control characters
    kind = "" if isinstance(error, UserError | StoreError) else f"{type(error).__name__}: "
    return f"{kind}{redact(' '.join(printable.split()))[:300]}".rstrip(": ")
