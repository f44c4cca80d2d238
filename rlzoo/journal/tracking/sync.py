"""Brings an MLflow store up to what a run directory holds."""

from __future__ import annotations

import tempfile
import zlib
from pathlib import Path, PurePosixPath
from typing import Any

from rlzoo.errors import UserError
from rlzoo.journal.tracking.completions import LOGGED, TABLE, logged_table, table_of
from rlzoo.journal.tracking.description import NOTE
from rlzoo.journal.tracking.inputs import send_inputs
from rlzoo.journal.tracking.machine import FILE as MACHINE
from rlzoo.journal.tracking.model import final_checkpoint, send_model
from rlzoo.journal.tracking.record import FOLDER, Record, Sent, without_password
from rlzoo.journal.tracking.rows import Rows, has_point, points
from rlzoo.support.redaction import redact

ID_TAG = "rlzoo_id"
IN_MEMORY = ("sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite://:memory:")
LONGEST_ERROR = 10_000  # characters
KIND = "mlflow.experimentKind"
"""The tag by which MLflow's pages show runs and models, rather than traces and judges."""


class Sync:
    """Sends a directory to a store; what was sent is not sent again, whoever sent it, and whatever became of them.

    Rows of ``metrics.jsonl`` go in order, so the last step the store has says which are missing.

    Example:
        ``Sync(Path("runs/my-run"), tracking_uri()).send(is_over=True)``
    """

    def __init__(self, directory: Path, uri: str) -> None:
        self.directory = directory
        self.sent = Sent.read(directory, uri)
        self.num_rows = self.num_files = 0  # sent by this object
        self._uri = uri
        self._client: Any = None  # made by the first call that reaches the store
        self._rows: Rows | None = None  # of metrics.jsonl, and of the machine's load
        self._load: Rows | None = None
        self._told: dict[str, str] = {}  # tags

    def send(self, *, is_over: bool) -> None:
        """Send what is new.

        Args:
            is_over: nothing more will be written, so what is logged at the end goes too.

        Raises:
            Exception: whatever the store answers; the next call goes on from there.
        """
        record = Record.read(self.directory)
        assert record is not None, "a directory is tracked after its record is written"
        if self._client is None:
            self._client = self._connect(record)
        self._send_rows(record)
        self._send_tags(record)
        self._send_files(record, is_over)
        if is_over:
            self._send_end(record)
        self.report(None)

    def reconnect(self) -> None:
        """Connect again with the next call of `send`: the store may not be what it was before it failed."""
        self._client = None

    def report(self, trouble: str | None) -> None:
        """Write down what was sent, and what is the matter with the store."""
        self.sent.trouble = trouble
        self.sent.write(self.directory, self._uri)

    def _connect(self, record: Record) -> Any:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        if self._uri in IN_MEMORY:
            raise UserError(
                f"{self._uri!r} is a database in memory, which ends with its process; name a file, as in sqlite:///mlflow.db"
            )
        client = MlflowClient(self._uri)
        run = self._known_run(client)
        if run is None:
            self.sent = Sent(record.id, self._find_or_create(client, record))
            self.report(None)
            run = client.get_run(self.sent.run_id)
        if record.status == "RUNNING" != run.info.status:  # it goes on
            client.update_run(self.sent.run_id, status="RUNNING")
        written = {NOTE: record.tags.get(NOTE, "")} if NOTE in run.data.tags else {}  # perhaps by somebody, later
        self._told = {**run.data.tags, **written}
        send_inputs(client, run, record.data)
        params = [Param(key, value) for key, value in record.params.items() if key not in run.data.params]
        for start in range(0, len(params), 100):  # MLflow's own limit
            client.log_batch(self.sent.run_id, params=params[start : start + 100])
        return client

    def _known_run(self, client: Any) -> Any:
        """Return the run in the store; None if there is none yet, or the store was deleted and created again."""
        from mlflow import MlflowException

        if self.sent.run_id is None:
            return None
        try:
            return client.get_run(self.sent.run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None

    def _find_or_create(self, client: Any, record: Record) -> str:
        experiment = experiment_id(client, record.experiment)
        for run in client.search_runs([experiment], f"tags.{ID_TAG} = '{record.id}'"):  # made by one that was killed then
            return str(run.info.run_id)
        tags = {ID_TAG: record.id, **{name: value for name, value in record.tags.items() if value}}
        started = int(record.started * 1000)
        return str(client.create_run(experiment, start_time=started, run_name=record.name, tags=tags).info.run_id)

    def _send_rows(self, record: Record) -> None:
        if self._rows is None or self._load is None:
            self._rows = Rows(self.directory / "metrics.jsonl", record.curves)
            self._load = Rows(self.directory / FOLDER / MACHINE, "all")
        for step, number in self._rows.send(self._client, str(self.sent.run_id), self.sent.step):
            self.sent.step, self.num_rows = step, self.num_rows + number
        for sample, _ in self._load.send(self._client, str(self.sent.run_id), self.sent.sample):
            self.sent.sample = sample

    def _send_tags(self, record: Record) -> None:
        from mlflow.entities import RunTag

        tags = {name: value for name, value in record.tags.items() if value and self._told.get(name) != value}
        if tags:
            self._client.log_batch(self.sent.run_id, tags=[RunTag(name, value) for name, value in tags.items()])
            self._told |= tags

    def _send_files(self, record: Record, is_over: bool) -> None:
        for name in record.files:
            # one that grows all the time is sent when it is complete
            if is_over or name != "metrics.jsonl":
                self._send_file(self.directory / name, name)
        for picture in sorted((self.directory / "figures").rglob("*.png")):
            self._send_file(picture, str(picture.relative_to(self.directory / "figures")))

    def _send_file(self, file: Path, name: str) -> None:
        # a directory from somebody else may name, or point at, any file of this machine
        if not file.exists() or not file.resolve().is_relative_to(self.directory.resolve()):
            return
        state = [file.stat().st_size, file.stat().st_mtime_ns]
        if self.sent.files.get(name) != state:
            self._client.log_artifact(self.sent.run_id, str(file), str(PurePosixPath(name).parent) if "/" in name else None)
            self.sent.files[name] = state
            self.num_files += 1

    def _send_end(self, record: Record) -> None:
        self._send_table(record)
        last = {"step": record.step, "time/clock": record.ended or 0.0, **record.metrics}
        if not has_point(self._client, str(self.sent.run_id), last, record.curves):
            self._client.log_batch(self.sent.run_id, metrics=points(last, record.curves))
        self._send_model(record)
        status = "KILLED" if record.status == "RUNNING" else record.status  # its process is gone without a word
        ended = None if record.ended is None else int(record.ended * 1000)
        self._client.set_terminated(self.sent.run_id, status, ended)

    def _send_table(self, record: Record) -> None:
        """Sampled completions as a table that MLflow's UI shows."""
        table = table_of(self.directory, record.completions)
        if table is None or self.sent.files.get(TABLE) == (state := [len(table), zlib.crc32(table.encode())]):
            return
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / TABLE
            file.write_text(table, encoding="utf-8")
            self._client.log_artifact(self.sent.run_id, str(file))
        self._client.set_tag(self.sent.run_id, LOGGED, logged_table())
        self.sent.files[TABLE] = state

    def _send_model(self, record: Record) -> None:
        """The last checkpoint of a run that came to its end."""
        checkpoint = final_checkpoint(self.directory, record.step, record.max_model_mb) if record.status == "FINISHED" else None
        if checkpoint is not None and self.sent.model != checkpoint.name:
            send_model(self._client, self._client.get_run(self.sent.run_id), record.id, checkpoint, record.step)
            self.sent.model = checkpoint.name


def experiment_id(client: Any, name: str) -> str:
    """The experiment of this name, made if there is none."""
    from mlflow import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name, tags={KIND: "custom_model_development"}))
        except MlflowException:  # another run was quicker
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return str(found.experiment_id)


def describe(error: Exception, uri: str) -> str:
    """What went wrong, in a line without a password."""
    text = str(error)[:LONGEST_ERROR].replace(uri, without_password(uri))  # a server may answer with megabytes
    printable = "".join(char if char.isprintable() else " " for char in text)  # and with a terminal's control characters
    return f"{type(error).__name__}: {redact(' '.join(printable.split()))[:300]}".rstrip(": ")
