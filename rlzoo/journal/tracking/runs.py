"""MLflow runs that have no directory of their own: a sweep's, and those that are replaced."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlzoo.journal.tracking.record import DEFAULT_STORE, tracking_uri
from rlzoo.journal.tracking.store import bounded_store
from rlzoo.journal.tracking.sync import experiment_id


def open_parent(experiment: str, run_name: str, tags: Mapping[str, str]) -> str:
    """Start an MLflow run that others will be nested under; returns its id."""
    with bounded_store():
        client = _client()
        entry = experiment_id(client, os.environ.get("MLFLOW_EXPERIMENT_NAME") or experiment)
        return str(client.create_run(entry, run_name=run_name, tags=dict(tags)).info.run_id)


def close_parent(run_id: str, status: str) -> None:
    """End it as FINISHED, FAILED or KILLED."""
    with bounded_store():
        _client().set_terminated(run_id, status)


def log_artifact(run_id: str, path: Path) -> None:
    """Add a file to a run that is not the current one."""
    with bounded_store():
        _client().log_artifact(run_id, str(path))


def common_parent(run_ids: Sequence[str]) -> str | None:
    """The run that all of these are nested under; None if there is none, or the store does not know them."""
    uri = tracking_uri()
    if not run_ids or (uri == DEFAULT_STORE and not Path(uri.removeprefix("sqlite:///")).exists()):
        return None  # asking would make a store
    with bounded_store():
        from mlflow import MlflowException

        client = _client()
        try:
            parents = {client.get_run(run_id).data.tags.get("mlflow.parentRunId") for run_id in run_ids}
        except MlflowException:
            return None
    return parents.pop() if len(parents) == 1 else None


def _client() -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri())
