"""Describes what is uploaded to MLflow from a run directory and what each store has already received."""

from __future__ import annotations

import json
import os
import subprocess
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import psutil
from pydantic import TypeAdapter, ValidationError

from rlzoo.config.redaction import redact, redact_settings, without_userinfo
from rlzoo.core.errors import UserError, first_mistake
from rlzoo.core.settings import flatten
from rlzoo.support.atomic import write_text, writing
from rlzoo.support.reading import remedy

T = TypeVar("T")

DEFAULT_STORE = "sqlite:///mlflow.db"
EXPERIMENT_ID = "MLFLOW_EXPERIMENT_ID"  # MLflow's environment variable
SWEEP = "RLZOO_SWEEP"  # environment variable with the folder of the sweep that a run belongs to
FOLDER = "tracking"
LONGEST_PARAM = 6000  # maximum number of characters, which is MLflow's own limit

Status = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]


@dataclass(frozen=True, slots=True)
class Upload:
    """The data to upload to MLflow from a run directory, in addition to the rows of its ``metrics.jsonl``."""

    id: str  # value of the tag that identifies the run in every store
    experiment: str
    name: str
    tags: dict[str, str]
    params: dict[str, str]  # dotted keys, as in --set
    started: float  # start time in seconds since 1970
    files: tuple[str, ...] = ()  # logged as artifacts, together with figures/
    status: Status = "RUNNING"
    ended: float | None = None
    step: int = 0  # step number under which `metrics` are logged
    metrics: dict[str, float] = field(default_factory=dict)  # metrics of the whole run
    experiment_ids: dict[str, str] = field(default_factory=dict)  # by store; takes precedence over `experiment`

    @classmethod
    def new(cls, experiment: str, name: str, *, tags: Mapping[str, str], params: Mapping[str, Any], **others: Any) -> Self:
        """Create an upload that starts at the current time. ``others`` sets further fields by name."""
        ours = {
            "mlflow.user": psutil.Process().username(),
            "mlflow.source.type": "LOCAL",
            **({"mlflow.source.git.commit": tags["git_commit"]} if tags.get("git_commit") else {}),
            **({"sweep": sweep} if (sweep := os.environ.get(SWEEP)) else {}),
        }
        return cls(
            id=uuid.uuid4().hex,
            experiment=redact(os.environ.get("MLFLOW_EXPERIMENT_NAME") or experiment),
            name=name,
            tags=redact_settings({**ours, **tags}),
            params={key: str(value)[:LONGEST_PARAM] for key, value in flatten(redact_settings(params)).items()},
            started=time.time(),
            experiment_ids={without_password(tracking_uri()): chosen} if (chosen := os.environ.get(EXPERIMENT_ID)) else {},
            **others,
        )

    @classmethod
    def read(cls, directory: Path) -> Upload | None:
        """Read the upload of a directory, or return None if there is none."""
        return _read(directory / FOLDER / "record.json", _UPLOAD)

    def write(self, directory: Path) -> None:
        """Write the upload to a directory, replacing any older upload."""
        _write(directory / FOLDER / "record.json", asdict(self), self.id)


@dataclass(slots=True)
class Uploaded:
    """The data that has been sent to one store from a run directory."""

    id: str  # ID of the upload
    run_id: str | None = None
    files: dict[str, list[int]] = field(default_factory=dict)  # size and modification time when the file was sent
    trouble: str | None = None  # the error from the last attempt to reach the store

    @classmethod
    def read(cls, directory: Path, uri: str) -> Uploaded:
        """Read what a store has received. The object is empty if the store has not received this upload."""
        upload, uploaded = Upload.read(directory), uploaded_to(directory).get(without_password(uri))
        own_id = "" if upload is None else upload.id
        return uploaded if uploaded is not None and uploaded.id == own_id else cls(own_id)

    def write(self, directory: Path, uri: str) -> None:
        """Save this object in the directory, for use by the process that sends the remaining data."""
        stores = uploaded_to(directory) | {without_password(uri): self}
        _write(directory / FOLDER / "sent.json", {store: asdict(sent) for store, sent in stores.items()}, self.id)


def uploaded_to(directory: Path) -> dict[str, Uploaded]:
    """Return what each store has received, or {} if the file is damaged, because the stores can be queried instead."""
    with suppress(UserError):
        return _read(directory / FOLDER / "sent.json", _UPLOADED) or {}
    return {}


def run_id_of(directory: Path) -> str | None:
    """Return the ID of the directory's run in the current store, or None if the store does not have the run."""
    return Uploaded.read(directory, tracking_uri()).run_id


def tracking_uri() -> str:
    """Return ``MLFLOW_TRACKING_URI`` if it is set, or else the address of a SQLite file in the current directory."""
    return os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_STORE


def without_password(uri: str) -> str:
    """Return the address of a store without its password. For the default store, return its absolute path."""
    if uri == DEFAULT_STORE:
        return f"sqlite:///{Path('mlflow.db').resolve()}"
    return without_userinfo(uri.encode(errors="backslashreplace").decode())  # the variable may not be valid Unicode


def git_commit() -> str:
    """Return the git commit of the current directory, or an empty string outside a repository."""
    try:
        answer = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""


_UPLOAD, _UPLOADED = TypeAdapter(Upload), TypeAdapter(dict[str, Uploaded])


def _read(file: Path, kind: TypeAdapter[T]) -> T | None:
    try:
        return kind.validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        advice = remedy(error, "if you remove it, the run is logged to MLflow again")
        raise UserError(f"{str(file)!r} cannot be read: {first_mistake(error)}; {advice}") from error


def _write(file: Path, content: Mapping[str, Any], key: str) -> None:
    with writing(file):
        file.parent.mkdir(exist_ok=True)
        write_text(file, json.dumps(content, indent=1) + "\n", key)
