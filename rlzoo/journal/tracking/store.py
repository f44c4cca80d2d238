"""Connects to an MLflow store, with limits in case the store is slow, sends endless replies, or is not an MLflow server."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from rlzoo.config.run_config import SAME_CONTEST
from rlzoo.errors import UserError
from rlzoo.journal.tracking.record import EXPERIMENT_ID, tracking_uri
from rlzoo.journal.tracking.views import FILTER, write_view
from rlzoo.support.replies import bounded_replies

LARGEST_REPLY = 16 * 2**20
"""Maximum size of a reply in bytes. The largest reply, the history of a metric, has about 90 bytes per step."""

LONGEST_REPLY = 60.0  # maximum duration of a reply in seconds

SPARE_MEMORY = 2**30
"""Number of bytes that the process may allocate beyond its current memory: a compressed reply can expand a thousandfold."""

KIND = "mlflow.experimentKind"  # tag that makes MLflow's pages show runs and models instead of traces and judges

_DEFAULTS = {
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",  # otherwise a new store logs every table, and a failing store logs a traceback
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # the default retries take minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}


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
    prefix = "sqlite:///"
    return uri.startswith(prefix) and not Path(uri.removeprefix(prefix).partition("?")[0]).exists()


def open_parent(experiment: str, run_name: str, tags: Mapping[str, str]) -> str:
    """Create an MLflow run under which other runs will be nested, and return its ID."""
    with connected() as client:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or experiment
        entry = experiment_id(client, name, os.environ.get(EXPERIMENT_ID))
        return str(client.create_run(entry, run_name=run_name, tags=dict(tags)).info.run_id)


@contextmanager
def connected() -> Iterator[Any]:
    """Yield an MLflow client for the current store, with the limits of `bounded_store`."""
    with bounded_store():
        from mlflow import MlflowClient

        yield MlflowClient(tracking_uri())
