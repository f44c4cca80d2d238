"""Connects to an MLflow store, which may be slow, never stop sending, or not be MLflow's at all."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from rlzoo.journal.tracking.record import tracking_uri
from rlzoo.journal.tracking.views import write_view
from rlzoo.support.replies import bounded_replies

LARGEST_REPLY = 16 * 2**20
"""Bytes of a reply. The history of a metric, the largest reply that is asked for, has about 90 bytes for a step."""

LONGEST_REPLY = 60.0  # seconds of a reply

SPARE_MEMORY = 2**30
"""Bytes that this process may take beside what it has: a compressed reply grows when it is read, a thousandfold at most."""

KIND = "mlflow.experimentKind"  # the tag by which MLflow's pages show runs and models, rather than traces and judges

_DEFAULTS = {
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",  # a new store logs every table that it makes, and one that fails a traceback
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # MLflow's own retries take minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}


@contextmanager
def bounded_store() -> Iterator[None]:
    """Bound what a store can take of this process within the block: time and size of its replies, and memory."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    import mlflow  # noqa: F401  (what it takes itself does not count)

    former, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = psutil.Process().memory_info().data + SPARE_MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (limit if former == resource.RLIM_INFINITY else min(limit, former), most))
    try:
        with bounded_replies(LARGEST_REPLY, LONGEST_REPLY):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (former, most))


def experiment_id(client: Any, name: str) -> str:
    """Return the id of the experiment with this name. Creates it, with its saved view, if there is none."""
    from mlflow import MlflowException

    found = client.get_experiment_by_name(name)
    if found:
        return str(found.experiment_id)
    try:
        made = str(client.create_experiment(name, tags={KIND: "custom_model_development"}))
    except MlflowException:  # another run was quicker
        if found := client.get_experiment_by_name(name):
            return str(found.experiment_id)
        raise
    write_view(client, made)
    return made


def latest_experiment() -> str | None:
    """Return the id of the experiment with the newest run in the current store, with its saved view; None if it has none."""
    with connected() as client:
        found = client.search_experiments(order_by=["last_update_time DESC"])
        own = [experiment for experiment in found if experiment.experiment_id != "0"]  # MLflow makes "Default" itself
        runs = client.search_runs([experiment.experiment_id for experiment in own], max_results=1) if own else []
        if not own:
            return None
        latest = str(runs[0].info.experiment_id if runs else own[0].experiment_id)  # runs: newest first
        write_view(client, latest)
        return latest


def is_missing(uri: str) -> bool:
    """Whether the store is a SQLite file that does not exist. Connecting to it would create it."""
    prefix = "sqlite:///"
    return uri.startswith(prefix) and not Path(uri.removeprefix(prefix).partition("?")[0]).exists()


def open_parent(experiment: str, run_name: str, tags: Mapping[str, str]) -> str:
    """Start an MLflow run that others will be nested under; returns its id."""
    with connected() as client:
        entry = experiment_id(client, os.environ.get("MLFLOW_EXPERIMENT_NAME") or experiment)
        return str(client.create_run(entry, run_name=run_name, tags=dict(tags)).info.run_id)


@contextmanager
def connected() -> Iterator[Any]:
    """MLflow's client of the current store, which is bounded within the block."""
    with bounded_store():
        from mlflow import MlflowClient

        yield MlflowClient(tracking_uri())
