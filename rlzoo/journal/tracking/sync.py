"""Sends the contents of a run directory to an MLflow store, skipping what the store already has."""

from __future__ import annotations

import logging
import os
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

from rlzoo.core.errors import RunError, one_line
from rlzoo.journal.tracking.description import NOTE
from rlzoo.journal.tracking.rows import Lines, Points, accepted_name
from rlzoo.journal.tracking.store import artifact_repository, connect, experiment_id, find_run
from rlzoo.journal.tracking.uploads import EXPERIMENT_ID, Upload, Uploaded, without_password

logger = logging.getLogger("rlzoo")

ID_TAG = "rlzoo_id"


class Sync:
    """Sends a run directory to a store. Data that an earlier process sent, even one that was killed, is not sent again."""

    def __init__(self, directory: Path, uri: str) -> None:
        self.directory = directory
        self.uploaded = Uploaded.read(directory, uri)
        self.num_rows = self.num_files = 0  # numbers that this object has sent
        self._uri = uri
        self._client: Any = None  # created by the first call that reaches the store
        self._tags: dict[str, str] = {}  # tags in the store
        self._artifacts: Any = None  # None if the location that the store names is refused
        self._notes: set[str] = set()  # warnings that have been logged or will be

    def send(self, *, is_over: bool) -> None:
        """Send everything that is new.

        Args:
            is_over: whether the run has ended. If so, the final metrics and the status are also sent.

        Raises:
            Exception: any error from the store. The next call reconnects and sends what is missing.
        """
        upload = Upload.read(self.directory)
        assert upload is not None, "a directory is tracked after its record.json is written"
        former = set(self._notes)
        try:
            if self._client is None:
                self._connect(upload)
            rows = self._lines.added()
            self.num_rows += self._points.send(rows)
            names = {name: accepted_name(name) for name in chain(upload.params, upload.metrics, *rows)}
            self._notes |= {f"{name!r} is logged as {new!r}" for name, new in names.items() if new != name}
            self._send_tags(upload)
            self._send_files(upload, is_over)
            if is_over:
                self._send_end(upload)
        except Exception:
            self._client = None
            raise
        if self._notes > former:
            logger.warning("MLflow: %s", one_line("; ".join(sorted(self._notes - former))))
        self.report(None)

    def report(self, trouble: str | None) -> None:
        """Record in the run directory what was sent and the store's current error, if any."""
        self.uploaded.trouble = trouble
        self.uploaded.write(self.directory, self._uri)

    def _connect(self, upload: Upload) -> None:
        """Find or create the run in the store and send its parameters."""
        from mlflow.entities import Param

        client = connect(self._uri)
        run = self._find(client, upload)
        run_id = str(run.info.run_id)
        experiment = client.get_experiment(run.info.experiment_id)
        if experiment.lifecycle_stage != "active":
            restore = f"mlflow experiments restore -x {experiment.experiment_id}"
            raise RunError(f"experiment {experiment.name!r} was deleted; restore it with: {restore}")
        if run.info.lifecycle_stage != "active":
            raise RunError(f"run {run_id} was deleted; restore it with: mlflow runs restore --run-id {run_id}")
        if run_id != self.uploaded.run_id:
            self.uploaded = Uploaded(upload.id, run_id)
            self.report(None)
        if upload.status == "RUNNING" != run.info.status:  # the run was resumed
            client.update_run(run_id, status="RUNNING")
        written = {NOTE: upload.tags.get(NOTE, "")} if NOTE in run.data.tags else {}  # a user may have edited the note
        self._tags = {**run.data.tags, **written}
        params = {accepted_name(key): value for key, value in upload.params.items()}
        new = [Param(key, value) for key, value in params.items() if key not in run.data.params]
        client.log_batch(run_id, params=new, synchronous=True)
        self._lines, self._points = Lines(self.directory / "metrics.jsonl"), Points(client, run_id)
        try:
            self._artifacts = artifact_repository(run.info.artifact_uri, self._uri)
        except RunError as error:
            self._artifacts, self._notes = None, self._notes | {str(error)}
        self._client = client

    def _find(self, client: Any, upload: Upload) -> Any:
        """Find the run in the store, or create it."""
        if self.uploaded.run_id is not None and (run := find_run(client, self.uploaded.run_id)) is not None:
            return run
        chosen = os.environ.get(EXPERIMENT_ID) or upload.experiment_ids.get(without_password(self._uri))
        experiment = experiment_id(client, upload.experiment, chosen)
        for run in client.search_runs([experiment], f"tags.{ID_TAG} = '{upload.id}'"):  # a killed process created it
            return run
        tags = {ID_TAG: upload.id, **{name: value for name, value in upload.tags.items() if value}}
        return client.create_run(experiment, start_time=int(upload.started * 1000), run_name=upload.name, tags=tags)

    def _send_tags(self, upload: Upload) -> None:
        from mlflow.entities import RunTag

        tags = {name: value for name, value in upload.tags.items() if value and self._tags.get(name) != value}
        self._client.log_batch(
            self.uploaded.run_id, tags=[RunTag(name, value) for name, value in tags.items()], synchronous=True
        )
        self._tags |= tags

    def _send_files(self, upload: Upload, is_over: bool) -> None:
        for name in upload.files:
            # metrics.jsonl grows throughout the run, so it is sent at the end
            if is_over or name != "metrics.jsonl":
                self._send_file(self.directory / name, name)
        for page in sorted((self.directory / "figures").rglob("*.html")):
            self._send_file(page, str(page.relative_to(self.directory / "figures")))

    def _send_file(self, file: Path, name: str) -> None:
        # an untrusted run directory could name or link to any file
        if self._artifacts is None or not file.exists() or not file.resolve().is_relative_to(self.directory.resolve()):
            return
        state = [file.stat().st_size, file.stat().st_mtime_ns]
        if self.uploaded.files.get(name) != state:
            self._artifacts.log_artifact(str(file), str(PurePosixPath(name).parent) if "/" in name else None)
            self.uploaded.files[name] = state
            self.num_files += 1

    def _send_end(self, upload: Upload) -> None:
        """Send the whole-run metrics and the status, which are complete only when the run ends."""
        client, run_id = self._client, str(self.uploaded.run_id)
        last = {"step": upload.step, "time/clock": upload.ended or 0.0, **upload.metrics}
        Points(client, run_id).send([last])
        status = "KILLED" if upload.status == "RUNNING" else upload.status  # the run's process ended without setting a status
        client.set_terminated(run_id, status, None if upload.ended is None else int(upload.ended * 1000))
