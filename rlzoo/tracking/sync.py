"""Brings an MLflow store up to what a run directory holds."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from rlzoo.errors import UserError, shown
from rlzoo.parsing import parse_json
from rlzoo.redaction import redact
from rlzoo.tracking.record import Record, Sent, without_password

ID_TAG = "rlzoo_id"
TABLE = "completions.json"
LARGEST_CALL = 1000  # metrics, MLflow's own limit


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
        self._offset = 0  # into metrics.jsonl
        self._rows: list[dict[str, float]] = []  # read and not sent
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
        self._send_rows()
        self._send_tags(record)
        self._send_files(record, is_over)
        if is_over:
            self._send_end(record)
        self.report(None)

    def report(self, trouble: str | None) -> None:
        """Write down what was sent, and what is the matter with the store."""
        self.sent.trouble = trouble
        self.sent.write(self.directory, self._uri)

    def _connect(self, record: Record) -> Any:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        client = MlflowClient(self._uri)
        if self.sent.run_id is None:
            self.sent.run_id = self._find_or_create(client, record)
            self.report(None)
        run = client.get_run(self.sent.run_id)
        if record.status == "RUNNING" != run.info.status:  # it goes on
            client.update_run(self.sent.run_id, status="RUNNING")
        params = [Param(key, value) for key, value in record.params.items() if key not in run.data.params]
        for start in range(0, len(params), 100):  # MLflow's own limit
            client.log_batch(self.sent.run_id, params=params[start : start + 100])
        return client

    def _find_or_create(self, client: Any, record: Record) -> str:
        experiment = experiment_id(client, record.experiment)
        for run in client.search_runs([experiment], f"tags.{ID_TAG} = '{record.id}'"):  # made by one that was killed then
            return str(run.info.run_id)
        tags = {**record.tags, ID_TAG: record.id}
        started = int(record.started * 1000)
        return str(client.create_run(experiment, start_time=started, run_name=record.name, tags=tags).info.run_id)

    def _has(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether the store has these metrics at that step."""
        history = self._client.get_metric_history(self.sent.run_id, next(iter(metrics))) if metrics else []
        return not metrics or any(metric.step == step for metric in history)

    def _send_rows(self) -> None:
        is_first = self._offset == 0
        self._rows += [row for row in self._read_rows() if row["step"] > self.sent.step]
        # of rows sent by a process that was killed before it wrote that down
        while is_first and self._rows and self._has(int(self._rows[0]["step"]), curves(self._rows[0])):
            self.sent.step = int(self._rows.pop(0)["step"])
        while self._rows:
            number = 0
            metrics: list[Any] = []
            while number < len(self._rows) and len(metrics) + len(curves(self._rows[number])) <= LARGEST_CALL:
                metrics += self._metrics(self._rows[number])
                number += 1
            self._client.log_batch(self.sent.run_id, metrics=metrics)
            self.sent.step, self.num_rows = int(self._rows[number - 1]["step"]), self.num_rows + number
            del self._rows[:number]

    def _read_rows(self) -> Iterator[dict[str, float]]:
        """Whole lines that were added since the last time."""
        file = self.directory / "metrics.jsonl"
        if not file.exists():
            return
        with file.open("rb") as stream:
            stream.seek(self._offset)
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield json.loads(line)

    def _metrics(self, row: Mapping[str, float]) -> list[Any]:
        from mlflow.entities import Metric

        stamp, step = int(row.get("time/clock", 0.0) * 1000), int(row["step"])
        return [Metric(key, value, stamp, step) for key, value in curves(row).items()]

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
        if not self._has(record.step, record.metrics):
            self._client.log_batch(
                self.sent.run_id,
                metrics=self._metrics({"step": record.step, "time/clock": record.ended or 0.0, **record.metrics}),
            )
        status = "KILLED" if record.status == "RUNNING" else record.status  # its process is gone without a word
        ended = None if record.ended is None else int(record.ended * 1000)
        self._client.set_terminated(self.sent.run_id, status, ended)

    def _send_table(self, record: Record) -> None:
        """Sampled completions as a table that MLflow's UI shows."""
        rows = list(sampled_completions(self.directory, record.completions))
        if not rows:
            return
        table = {"columns": list(rows[0]), "data": [list(row.values()) for row in rows]}
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / TABLE
            file.write_text(json.dumps(table), encoding="utf-8")
            self._client.log_artifact(self.sent.run_id, str(file))
        self._client.set_tag(self.sent.run_id, "mlflow.loggedArtifacts", json.dumps([{"path": TABLE, "type": "table"}]))


def experiment_id(client: Any, name: str) -> str:
    """The experiment of this name, made if there is none."""
    from mlflow import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name))
        except MlflowException:  # another run was quicker
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return str(found.experiment_id)


def curves(row: Mapping[str, float]) -> dict[str, float]:
    """What is logged of a row; the ends of the intervals of every length bin are looked at in figures, not as curves."""
    own = ("step", "time/clock")
    return {key: row[key] for key in row if key not in own and not ("_length_bin_" in key and "_ci_" in key)}


def sampled_completions(directory: Path, number: int) -> Iterator[dict[str, Any]]:
    """The first responses to the first ``number`` prompts of every step, from the recorded rollouts."""
    columns = ("question", "answer", "response", "reward", "length")
    for file in sorted((directory / "rollouts").glob("[0-9]*.jsonl")) if number else ():
        seen = -1
        if not file.stem.isdecimal():
            continue
        with file.open("rb") as stream:
            for line_number, line in enumerate(stream, start=1):
                row = _response(line, f"{file} line {line_number}")
                if row["group"] >= number:
                    break
                if row["group"] != seen:
                    seen = row["group"]
                    yield {"step": int(file.stem), **{name: row.get(name) for name in columns}}


def _response(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = parse_json(line.decode())
    except ValueError as error:
        raise UserError(f"{place}: not a recorded response: {error}") from error
    if not isinstance(row, dict) or not isinstance(row.get("group"), int):
        raise UserError(f"{place}: not a recorded response: {shown(row)} has no group")
    return row


def describe(error: Exception, uri: str) -> str:
    """What went wrong, in a line without a password."""
    text = redact(" ".join(str(error).split()).replace(uri, without_password(uri)))
    return f"{type(error).__name__}: {text[:300]}"
