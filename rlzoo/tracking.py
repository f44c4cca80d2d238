"""MLflow: parameters, metrics, completions and files of a run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

DEFAULT_STORE = "sqlite:///mlflow.db"


def tracking_uri() -> str:
    """``MLFLOW_TRACKING_URI`` if set, else a SQLite file in the current directory."""
    return os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_STORE


def git_commit() -> str:
    """The current directory's commit, or an empty string outside a repository."""
    try:
        answer = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""


class Tracker:
    """One MLflow run, ended as FINISHED, KILLED or FAILED by the way its block is left; without an experiment, nothing.

    Example:
        ``with Tracker("rlzoo", "my-run", tags={"seed": "0"}, params=config) as tracker: tracker.log(1, metrics)``
    """

    def __init__(self, experiment: str | None, run_name: str, *, tags: Mapping[str, str], params: Mapping[str, Any]) -> None:
        self._mlflow: Any = None
        self.run_id: str | None = None
        if experiment is None:
            return
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")  # a new store tells of every table it makes
        import mlflow

        self._mlflow = mlflow
        mlflow.set_tracking_uri(tracking_uri())
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or experiment)
        run = mlflow.start_run(run_name=run_name, tags=dict(tags))
        self.run_id = run.info.run_id
        mlflow.log_params({key: str(value)[:6000] for key, value in flatten(params).items()})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one step's metrics."""
        if self._mlflow is not None:
            self._mlflow.log_metrics(dict(metrics), step=step)

    def log_completions(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log sampled completions as a table that MLflow's UI shows, one call for the whole run."""
        if rows and self._mlflow is not None:
            columns = {key: [row[key] for row in rows] for key in rows[0]}
            self._mlflow.log_table(columns, artifact_file="completions.json")

    def log_file(self, path: Path) -> None:
        """Log a file as an artifact."""
        if self._mlflow is not None:
            self._mlflow.log_artifact(str(path))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._mlflow is None:
            return
        stopped = isinstance(error, (KeyboardInterrupt, SystemExit))
        self._mlflow.end_run("FINISHED" if kind is None else "KILLED" if stopped else "FAILED")


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted keys, the same that ``--set`` takes."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
