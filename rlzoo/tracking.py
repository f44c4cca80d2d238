"""MLflow: parameters, metrics, completions and files of a run."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rlzoo.signals import held_signals

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT_STORE = "sqlite:///mlflow.db"
PARENT_RUN = "RLZOO_MLFLOW_PARENT_RUN"
"""Environment variable with the MLflow run that this one is part of; a sweep sets it for its runs."""


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

    What is logged is handed to a thread, so that a slow store holds nothing up; leaving the block waits for it. A call that
    failed is raised by the next one, or by the end of the block.

    Example:
        ``with Tracker("rlzoo", "my-run", tags={"seed": "0"}, params=config) as tracker: tracker.log(1, metrics)``
    """

    def __init__(
        self,
        experiment: str | None,
        run_name: str,
        *,
        tags: Mapping[str, str],
        params: Mapping[str, Any],
        run_id: str | None = None,
    ) -> None:
        self._mlflow: Any = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mlflow")
        self._pending: list[Future[None]] = []
        self.run_id: str | None = None
        if experiment is None:
            return
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")  # a new store tells of every table it makes
        import mlflow

        self._mlflow = mlflow
        parent = os.environ.get(PARENT_RUN)
        try:
            with held_signals():
                mlflow.set_tracking_uri(tracking_uri())
                mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or experiment)
                if run_id is not None:  # a run that goes on: what it was started with is known
                    self.run_id = mlflow.start_run(run_id=run_id).info.run_id
                    return
                nested = {"mlflow.parentRunId": parent} if parent else {}
                self.run_id = mlflow.start_run(run_name=run_name, tags={**tags, **nested}).info.run_id
                mlflow.log_params({key: str(value)[:6000] for key, value in flatten(params).items()})
        except BaseException as error:
            if self.run_id is not None:
                self.__exit__(type(error), error, error.__traceback__)
            raise

    def _later(self, call: Callable[[], Any]) -> None:
        """Hand a call of MLflow's to the thread; nothing that stops the run can cut it in two there."""
        done = [future for future in self._pending if future.done()]
        self._pending = [future for future in self._pending if future not in done]
        for future in done:
            future.result()
        with held_signals():  # handed over whole, or not at all
            self._pending.append(self._thread.submit(lambda: call() and None))

    @property
    def is_on(self) -> bool:
        """Whether anything is tracked."""
        return self._mlflow is not None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one step's metrics."""
        if self._mlflow is not None:
            self._later(partial(self._mlflow.log_metrics, dict(metrics), step=step, run_id=self.run_id))

    def log_completions(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log sampled completions as a table that MLflow's UI shows, one call for the whole run."""
        if rows and self._mlflow is not None:
            columns = {key: [row[key] for row in rows] for key in rows[0]}
            self._later(partial(self._mlflow.log_table, columns, artifact_file="completions.json", run_id=self.run_id))

    def log_figure(self, figure: Figure, name: str) -> None:
        """Log a picture as an artifact."""
        if self._mlflow is not None:
            self._later(partial(self._mlflow.MlflowClient().log_figure, self.run_id, figure, name))

    def set_tag(self, name: str, value: str) -> None:
        """Tag the run; an empty value leaves it without the tag."""
        if value and self._mlflow is not None:
            self._later(partial(self._mlflow.MlflowClient().set_tag, self.run_id, name, value))

    def log_file(self, path: Path) -> None:
        """Log a file as an artifact."""
        if self._mlflow is not None:
            self._later(partial(self._mlflow.log_artifact, str(path), run_id=self.run_id))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._mlflow is None:
            return
        failed = None
        for future in self._pending:
            try:
                future.result()
            except Exception as exception:
                failed = failed or exception
        self._thread.shutdown()
        kind = kind or (type(failed) if failed else None)
        stopped = kind is not None and issubclass(kind, (KeyboardInterrupt, SystemExit))
        with held_signals():
            self._mlflow.end_run("FINISHED" if kind is None else "KILLED" if stopped else "FAILED")
        if failed is not None and error is None:
            raise failed


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted keys, the same that ``--set`` takes."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def open_parent(experiment: str, run_name: str, tags: Mapping[str, str]) -> str:
    """Start an MLflow run that others will be nested under; returns its id."""
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    import mlflow

    mlflow.set_tracking_uri(tracking_uri())
    entry = mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or experiment)
    client = mlflow.MlflowClient()
    return str(client.create_run(entry.experiment_id, run_name=run_name, tags=dict(tags)).info.run_id)


def close_parent(run_id: str, status: str) -> None:
    """End it as FINISHED, FAILED or KILLED."""
    import mlflow

    mlflow.MlflowClient(tracking_uri()).set_terminated(run_id, status)


def log_artifact(run_id: str, path: Path) -> None:
    """Add a file to a run that is not the current one."""
    import mlflow

    mlflow.MlflowClient(tracking_uri()).log_artifact(run_id, str(path))


def discard_run(run_id: str) -> None:
    """Hide a run that another one replaces; MLflow can restore it. A run that is not there is no mistake."""
    import mlflow

    with contextlib.suppress(mlflow.MlflowException):
        mlflow.MlflowClient(tracking_uri()).delete_run(run_id)


def common_parent(run_ids: Sequence[str]) -> str | None:
    """The run that all of these are nested under; None if there is none, or the store does not know them."""
    uri = tracking_uri()
    if not run_ids or (uri == DEFAULT_STORE and not Path(uri.removeprefix("sqlite:///")).exists()):
        return None  # asking would make a store
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # a server that is down is asked for minutes otherwise
    import mlflow

    client = mlflow.MlflowClient(tracking_uri())
    try:
        parents = {client.get_run(run_id).data.tags.get("mlflow.parentRunId") for run_id in run_ids}
    except mlflow.MlflowException:
        return None
    return parents.pop() if len(parents) == 1 else None
