"""Connects to an MLflow store, which may be slow, never stop sending, or not be MLflow's at all."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from rlzoo.journal.tracking.record import DEFAULT_STORE, tracking_uri
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
    """The experiment of this name, made if there is none."""
    from mlflow import MlflowException

    found = client.get_experiment_by_name(name)
    try:
        return str(found.experiment_id if found else client.create_experiment(name, tags={KIND: "custom_model_development"}))
    except MlflowException:  # another run was quicker
        if found := client.get_experiment_by_name(name):
            return str(found.experiment_id)
        raise


def open_parent(experiment: str, run_name: str, tags: Mapping[str, str]) -> str:
    """Start an MLflow run that others will be nested under; returns its id."""
    with connected() as client:
        entry = experiment_id(client, os.environ.get("MLFLOW_EXPERIMENT_NAME") or experiment)
        return str(client.create_run(entry, run_name=run_name, tags=dict(tags)).info.run_id)


def common_parent(run_ids: Sequence[str]) -> str | None:
    """The run that all of these are nested under; None if there is none, or the store does not know them."""
    uri = tracking_uri()
    if not run_ids or (uri == DEFAULT_STORE and not Path(uri.removeprefix("sqlite:///")).exists()):
        return None  # asking would make a store
    with connected() as client:
        from mlflow import MlflowException

        try:
            parents = {client.get_run(run_id).data.tags.get("mlflow.parentRunId") for run_id in run_ids}
        except MlflowException:
            return None
    return parents.pop() if len(parents) == 1 else None


@contextmanager
def connected() -> Iterator[Any]:
    """MLflow's client of the current store, which is bounded within the block."""
    with bounded_store():
        from mlflow import MlflowClient

        yield MlflowClient(tracking_uri())
