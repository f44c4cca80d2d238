"""The run directory: configuration, metrics, recorded rollouts and checkpoints of one run."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlzoo.config.redaction import redact_settings
from rlzoo.core.errors import UserError, shown
from rlzoo.core.plugin_files import copy_plugins
from rlzoo.journal import checkpoints
from rlzoo.journal.manifest import seal
from rlzoo.journal.recording import RecordedStep
from rlzoo.journal.state import IDENTITY, identity
from rlzoo.models.adapters import has_adapter
from rlzoo.models.pretrained import quiet
from rlzoo.support.atomic import follow_umask, replacing, sync, temporary_path, write_tensors, write_text
from rlzoo.support.lock import FILE as LOCK
from rlzoo.support.lock import Lock
from rlzoo.support.parsing import UnreadableError, parse_json
from rlzoo.support.reading import RECORDS, read_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rlzoo.core.policy import ClipPolicy


AS_LINE = json.JSONEncoder(ensure_ascii=False)
FOLDERS = ("rollouts", "checkpoints")
RECORDED = re.compile(r"([0-9]{6,18})(?:-[0-9]+)?\.(?:jsonl|safetensors)")
"""File names in ``rollouts/`` and ``replay/``: the step, followed by the update in ``replay/``."""
CREATED = (IDENTITY, *FOLDERS, "plugins")
"""Names that a new directory gets before its ``config.yaml``."""
CREATION = ".rlzoo-*.part"
"""Pattern of the temporary folder in which a new directory's files are written."""
NOTHING = re.compile(r"\.lock|lost\+found|\.rlzoo-\w+\.part")
"""Names that an empty directory may contain: a lock, ``lost+found``, and temporary folders of killed processes."""

CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO, errno.EFBIG)
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # `_code` returns EIO if torch.save fails

logger = logging.getLogger("rlzoo")


class UnwritableError(OSError):
    """Raised if a run's file cannot be written; the message says why and, on a full disk, how much space is needed and free."""


def why_not_written(error: Exception) -> str | None:
    """Return why a file could not be written, such as a full disk; None for errors of any other kind."""
    code = _code(error)
    if code is None or not (isinstance(error, UnwritableError) or code in CANNOT_WRITE):
        return None
    where = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
    return f"{error.strerror if isinstance(error, OSError) else os.strerror(code)}{where}"


def _code(error: Exception) -> int | None:
    """Return the ``errno`` of an error; None if it does not come from the operating system."""
    if isinstance(error, OSError):
        return error.errno
    if found := re.search(r"\(os error (\d+)\)", str(error)):  # from safetensors, which is written in Rust
        return int(found[1])
    return errno.EIO if "file write failed" in str(error) else None  # from torch.save


@contextmanager
def writing(file: Path, size: int = 0) -> Iterator[None]:
    """Inside the block, re-raise errors from writing files as `UnwritableError`.

    Args:
        file: the file or folder that is being written.
        size: approximate number of bytes that are needed; 0 if unknown.
    """
    try:
        yield
    except Exception as error:
        code = _code(error)
        if code is None or isinstance(error, UnwritableError):
            raise
        space = ""
        if code in NO_SPACE:
            free = shutil.disk_usage(next(path for path in (file, *file.parents) if path.is_dir())).free
            space = f": {f'about {_megabytes(size)} needed, ' if size else ''}{_megabytes(free)} free"
        raise UnwritableError(code, os.strerror(code) + space, str(file)) from error


class RunDirectory:
    """The directory of one run, which never overwrites another run and is written by one process at a time."""

    def __init__(self, path: Path, is_writer: bool = True, lock: Lock | None = None) -> None:
        self.path = path
        self.is_writer = is_writer  # only one process writes; in other processes, the writing methods do nothing
        self._lock = (lock or Lock(path)) if is_writer else None
        self._models_files: set[str] = set()  # files that transformers wrote into the checkpoint

    def close(self) -> None:
        """Release the lock, so that another process can write."""
        if self._lock is not None:
            self._lock.release()

    @classmethod
    def create(
        cls,
        path: Path,
        config_yaml: str,
        plugins: Sequence[str] = (),
        fingerprint: Mapping[str, Any] | None = None,
        *,
        is_writer: bool = True,
    ) -> RunDirectory:
        """Create the directory, write ``config.yaml``, and copy the plugin files of the run.

        An existing directory is used if it is empty, even if it is a mount point, a link or the current directory.

        Raises:
            UserError: the directory is not empty, or cannot be written.
            UnwritableError: the disk is full.
        """
        if not is_writer:
            return cls(path, is_writer)
        is_new, lock, made = not path.exists(), None, None
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = Lock(path)
            cls.check_free(path)  # another process may have created a run in the meantime
            _undo_creation(path)
            made = Path(tempfile.mkdtemp(prefix=".rlzoo-", suffix=".part", dir=path))
            with writing(made):
                for name in FOLDERS:
                    (made / name).mkdir()
                (made / IDENTITY).write_text(_record(uuid.uuid4().hex, fingerprint or {}), encoding="utf-8")
                copy_plugins(plugins, made / "plugins")
                (made / "config.yaml").write_text(config_yaml, encoding="utf-8")
            # config.yaml last: there, it marks a run, and here, a directory that is not yet complete
            for part in sorted(made.iterdir(), key=lambda part: part.name == "config.yaml"):
                part.replace(path / part.name)
            made.rmdir()
        except BaseException as error:
            if lock is not None:
                with suppress(OSError):  # the disk is damaged; the next attempt removes what remains
                    if made is not None:
                        _undo_creation(path)
                    if is_new:
                        (path / LOCK).unlink(missing_ok=True)
                        path.rmdir()
                lock.release()
            if not isinstance(error, OSError) or error.errno in NO_SPACE:
                raise
            raise UserError(f"output directory {str(path)!r} cannot be written: {error.strerror or error}") from error
        return cls(path, lock=lock)

    @cached_property
    def identity(self) -> str:
        """The random ID of the run, which marks its checkpoints and temporary files."""
        return identity(self.path)

    @staticmethod
    def check_free(path: Path) -> None:
        """Reject a directory that is not empty, before any time is spent on the run."""
        try:
            str(path).encode()
            entries = {*path.iterdir()} - _half_created(path) if path.is_dir() else set()
            taken = any(not NOTHING.fullmatch(entry.name) for entry in entries)
            is_other = not path.is_dir() and os.path.lexists(path)
        except (OSError, ValueError) as error:
            raise UserError(f"output directory {shown(str(path))} cannot be used: {error}") from error
        if taken:
            raise UserError(f"output directory {str(path)!r} is not empty; choose another with --output, or remove this one")
        if is_other:
            raise UserError(f"output directory {str(path)!r} is not a directory; choose another with --output")

    @staticmethod
    def check_begun(path: Path) -> None:
        """Reject a directory that is not that of a run, before any time is spent on the run."""
        if not (path / "config.yaml").is_file():
            raise UserError(f"--resume: {str(path)!r} is not a run directory: it has no config.yaml")
        for name in ("metrics.jsonl", "summary.json", *FOLDERS):
            if os.path.lexists(path / name) and (path / name).is_dir() != (name in FOLDERS):
                raise UserError(f"--resume: {str(path / name)!r} is not what a run writes there; move it away")

    @classmethod
    def resume(cls, path: Path, *, is_writer: bool = True) -> RunDirectory:
        """Open the directory of a run, and clean up after a process that was killed.

        Raises:
            UserError: there is no run, or another process has the lock.
        """
        cls.check_begun(path)
        directory = cls(path, is_writer)
        try:
            if is_writer:
                with writing(path):
                    for name in FOLDERS:
                        (path / name).mkdir(exist_ok=True)
                    checkpoints.tidy(path)
        except BaseException:
            directory.close()
            raise
        return directory

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line to ``metrics.jsonl``, and flush it to disk."""
        if not self.is_writer:
            return
        file, line = self.path / "metrics.jsonl", json.dumps({"step": step, **metrics}) + "\n"
        with writing(file, len(line)):
            is_new = not file.exists()
            with file.open("a", encoding="utf-8") as stream:
                stream.write(line)
                stream.flush()
                os.fsync(stream.fileno())
            if is_new:
                sync(self.path)

    def record_rollouts(self, responses: Iterable[Mapping[str, Any]], step: RecordedStep) -> None:
        """Write the responses of a step as text, then as a rollout file, which marks the step as recorded."""
        if not self.is_writer:
            return
        text = "".join(AS_LINE.encode(line) + "\n" for line in responses)
        texts = self.path / "rollouts" / f"{step.step:06d}.jsonl"
        with writing(texts, len(text)), replacing(texts, self.identity) as temporary:
            temporary.write_text(text, encoding="utf-8")
        file = texts.with_suffix(".safetensors")
        with writing(file, step.num_bytes):
            step.save(file, self.identity)

    def save_weights(self, step: int, update: int, weights: Mapping[str, Tensor]) -> None:
        """Save the weights as they were before an update, so that replay can compute gradients with them."""
        if not self.is_writer:
            return
        file = self.path / "replay" / f"{step:06d}-{update}.safetensors"
        with writing(file, _num_bytes(weights.values())):
            file.parent.mkdir(exist_ok=True)
            write_tensors(file, weights, self.identity)

    def summarise(self, facts: Mapping[str, object]) -> None:
        """Write ``summary.json``."""
        if not self.is_writer:
            return
        self._replace(self.path / "summary.json", json.dumps(facts, indent=2) + "\n")

    def record_change(self, fingerprint: Mapping[str, Any]) -> None:
        """Write the fingerprint of a run that was allowed to resume with changes."""
        if self.is_writer:
            self._replace(self.path / IDENTITY, _record(self.identity, fingerprint))
            if (record := self.path / "tracking" / "record.json").exists():  # it becomes another run in MLflow
                record.replace(record.with_name("record-before-change.json"))

    def save_figure(self, name: str, write: Callable[[Path], object]) -> None:
        """Let ``write`` save a picture or an HTML page to ``figures/``, whose contents are logged to MLflow."""
        if not self.is_writer:
            return
        file = self.path / "figures" / name
        with writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(file, self.identity) as temporary:
                write(temporary)

    def begin_checkpoint(
        self,
        name: str,
        model: PreTrainedModel,
        weights: Mapping[str, Tensor],
        tokenizer: PreTrainedTokenizerBase,
        policy: ClipPolicy,
        *,
        adapter: Mapping[str, Tensor] | None = None,
    ) -> Path:
        """Write the weights and the tokenizer for ``from_pretrained`` to a temporary folder, and return the folder.

        The settings of the rule are written to ``clip.json``; for an adaptive rule, they include its state. A LoRA adapter
        is also saved separately, in ``adapter/``; ``adapter`` holds its weights if the model is sharded. The caller may add
        files. `finish_checkpoint` turns the folder into a checkpoint.
        """
        temporary = temporary_path(self.path / "checkpoints" / name, self.identity)
        if not self.is_writer:
            return temporary
        with writing(temporary, _num_bytes(weights.values())):
            temporary.parent.mkdir(exist_ok=True)
            checkpoints.tidy(self.path)
            with torch.device("meta"):
                skeleton = type(model)(model.config)  # without weights or adapters
            skeleton.generation_config = model.generation_config
            with quiet():
                skeleton.save_pretrained(temporary, state_dict={})  # first without weights, to list the other files
                tokenizer.save_pretrained(temporary)
                self._models_files = {path.relative_to(temporary).as_posix() for path in temporary.rglob("*")}
                skeleton.save_pretrained(temporary, state_dict=dict(weights))
                if has_adapter(model):
                    model.save_pretrained(temporary / "adapter", state_dict=None if adapter is None else dict(adapter))
            state = {"name": policy.name, **redact_settings(policy.model_dump(mode="json"))}
            (temporary / "clip.json").write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        return temporary

    def finish_checkpoint(self, temporary: Path, keep: int, scores: Mapping[int, float] | None = None) -> None:
        """Seal a checkpoint, give it its final name, and remove old checkpoints."""
        if not self.is_writer:
            return
        folder = self._seal_and_rename(temporary)
        with writing(folder):
            checkpoints.rotate(self.path, int(folder.name.removeprefix("step-")), keep, scores or {})

    def finish_stopped(self, temporary: Path, step: int) -> None:
        """Seal and rename weights saved in the middle of a step, and remove weights saved in the middle of earlier steps."""
        if not self.is_writer:
            return
        with writing(temporary):
            mark = json.dumps({"run": self.identity, "step": step}) + "\n"
            (temporary / checkpoints.STOPPED).write_text(mark, encoding="utf-8")
        checkpoints.forget_older_stops(self.path, self._seal_and_rename(temporary))

    def drop_unfinished(self, name: str) -> None:
        """Delete the files of a checkpoint that could not be written."""
        if self.is_writer:
            with suppress(OSError):
                checkpoints.remove_unfinished(temporary_path(self.path / "checkpoints" / name, self.identity), name)

    def _seal_and_rename(self, temporary: Path) -> Path:
        folder = temporary.with_name(temporary.name.removeprefix(".").partition(".")[0])
        with writing(folder):
            follow_umask(temporary)
            seal(temporary, lambda name: name in self._models_files or checkpoints.FILES.fullmatch(name) is not None)
            checkpoints.put_in_place(temporary, folder, self.path)
            sync(folder.parent)
        return folder

    def cut_after(self, step: int) -> list[dict[str, float]]:
        """Move everything written after a step to ``superseded/``, and return the metrics up to that step.

        Raises:
            UserError: ``metrics.jsonl`` is damaged, or does not have every step up to ``step``.
        """
        file = self.path / "metrics.jsonl"
        # the last line may be incomplete
        rows = read_metrics(file) if file.exists() else []
        kept = [row for row in rows if row["step"] <= step]
        if [row["step"] for row in kept] != list(range(step + 1)):
            has = f"has only {len(kept)} of the {step + 1} rows up to that step" if rows else "is missing or empty"
            raise UserError(
                f"--resume: the checkpoint is from step {step}, but {str(file)!r} {has}; "
                "nothing was changed; restore the file, or start another run with another --output"
            )
        if self.is_writer:
            with writing(file):
                self._supersede(step, [row for row in rows if row["step"] > step])
                self._replace(file, "".join(json.dumps(row) + "\n" for row in kept))
        return [{key: value for key, value in row.items() if key != "step"} for row in kept]

    def _supersede(self, step: int, rows: Sequence[Mapping[str, float]]) -> None:
        found = [file for name in ("rollouts", "replay") for file in sorted((self.path / name).glob("[0-9]*"))]
        # files with other names do not belong to the run
        named = [(file, name) for file in found if file.is_file() and (name := RECORDED.fullmatch(file.name))]
        later = [file for file, name in named if int(name[1]) > step]
        if not rows and not later:
            return
        parent = self.path / "superseded"
        numbers = (str(number) for number in itertools.count(1))
        folder = next(parent / number for number in numbers if not os.path.lexists(parent / number))
        folder.mkdir(parents=True, exist_ok=True)
        if rows:
            self._replace(folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        for file in later:
            (folder / file.parent.name).mkdir(exist_ok=True)
            shutil.move(file, folder / file.parent.name / file.name)  # works across disks
        logger.info("moved everything that the run wrote after step %d to %s", step, folder)

    def _replace(self, file: Path, text: str) -> None:
        """Replace a file atomically, and flush it to disk."""
        with writing(file, len(text)):
            write_text(file, text, self.identity)


def _record(identity: str, fingerprint: Mapping[str, Any]) -> str:
    return json.dumps({"id": identity, "fingerprint": fingerprint}, indent=1) + "\n"


def _half_created(path: Path) -> set[Path]:
    """Return what a killed process has moved from its temporary folder to a new directory, but without ``config.yaml``."""
    folders = [file.parent for file in path.glob(f"{CREATION}/config.yaml")]
    moved = {path / name for folder in folders for name in CREATED if not os.path.lexists(folder / name)}
    return {entry for entry in moved if os.path.lexists(entry)}


def _undo_creation(path: Path) -> None:
    """Remove what processes have written that were interrupted while they created the directory."""
    for entry in _half_created(path):
        if entry.name in FOLDERS:
            entry.rmdir()
        else:
            (shutil.rmtree if entry.is_dir() else os.unlink)(entry)
    for folder in path.glob(CREATION):
        shutil.rmtree(folder, ignore_errors=True)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def read_metrics(file: Path) -> list[dict[str, float]]:
    """Read the rows of a ``metrics.jsonl`` file. An incomplete last line is skipped.

    Raises:
        UserError: the file cannot be read, or a line does not hold the metrics of a step. The message gives the line number.
    """
    try:
        lines = read_text(file, RECORDS).split("\n")
    except (OSError, ValueError) as error:
        raise UserError(f"{str(file)!r} cannot be read: {error}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = parse_json(line)
        except UnreadableError as error:
            if number == len(lines):  # without a newline, the line is incomplete
                break
            raise UserError(f"{str(file)!r} line {number}: not JSON: {error}") from error
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            raise UserError(f"{str(file)!r} line {number}: {shown(row)} is not an object of metrics with an integer 'step'")
        other = next((key for key, value in row.items() if type(value) not in (int, float)), None)
        if other is not None:
            raise UserError(f"{str(file)!r} line {number}: {shown(other)} is {shown(row[other])}, not a number")
        rows.append(row)
    return rows
