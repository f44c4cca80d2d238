"""The run directory, which holds the configuration, metrics, recorded rollouts and checkpoints of one run."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import shutil
import socket
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rlzoo.config.redaction import redact_settings
from rlzoo.core.errors import UserError, shown
from rlzoo.core.plugin_files import copy_plugins
from rlzoo.journal import checkpoints
from rlzoo.journal.manifest import seal
from rlzoo.journal.rollout_file import RolloutFile
from rlzoo.journal.state import IDENTITY, identity
from rlzoo.models.adapters import has_adapter
from rlzoo.models.pretrained import quiet, save_model
from rlzoo.support.atomic import follow_umask, replacing, sync, temporary_path, write_text, writing
from rlzoo.support.lock import FILE as LOCK
from rlzoo.support.lock import Lock
from rlzoo.support.parsing import UnreadableError, parse_json
from rlzoo.support.reading import read_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rlzoo.core.policy import ClipPolicy


AS_LINE = json.JSONEncoder(ensure_ascii=False)
FOLDERS = ("rollouts", "checkpoints")
STEP = re.compile(r"([0-9]+)\.(?:jsonl?|safetensors)")
"""Names of files in ``rollouts/`` and ``evaluations/``, which begin with the step."""
EMPTY = r"\.lock|lost\+found|\..*\.part"
"""Names that an empty directory may contain: a lock, ``lost+found``, and temporary files of killed processes."""
BEGUN = rf"{EMPTY}|{re.escape(IDENTITY)}|{'|'.join(FOLDERS)}|plugins"
"""Names in a run directory whose creation was interrupted before ``config.yaml`` was written."""

logger = logging.getLogger("rlzoo")


class RunDirectory:
    """The directory of one run. It never overwrites another run, and only one process at a time may write to it."""

    def __init__(self, path: Path, is_writer: bool = True) -> None:
        self.path = path
        self.is_writer = is_writer  # only one process writes; in other processes, the writing methods do nothing
        with writing(path / LOCK):
            self._lock = Lock(path) if is_writer else None

    def close(self) -> None:
        """Release the lock so that another process can write."""
        if self._lock is not None:
            self._lock.release()

    @classmethod
    def create(
        cls, path: Path, config_yaml: str, plugins: Sequence[str] = (), fingerprint: Mapping[str, Any] | None = None
    ) -> RunDirectory:
        """Create the directory, copy the run's plugin files, and write ``config.yaml``, which marks the directory as a run.

        An existing directory is used if it is empty or if its creation was interrupted, even if it is a mount point, a link or
        the current directory.

        Raises:
            UserError: the directory is not empty or cannot be created.
            UnwritableError: the disk is full.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            directory = cls(path)
        except OSError as error:
            raise UserError(f"output directory {str(path)!r} cannot be written: {error.strerror or error}") from error
        try:
            cls.check_free(path)  # another process may have created a run in the meantime
            with writing(path):
                key = uuid.uuid4().hex
                write_text(path / IDENTITY, _run_facts(key, fingerprint or {}), key)
                for name in FOLDERS:
                    (path / name).mkdir(exist_ok=True)
                copy_plugins(plugins, path / "plugins")
                write_text(path / "config.yaml", config_yaml, key)
        except BaseException:
            directory.close()
            raise
        return directory

    @cached_property
    def identity(self) -> str:
        """The random ID of the run, which identifies its checkpoints and temporary files."""
        return identity(self.path)

    @staticmethod
    def check_free(path: Path) -> None:
        """Reject a directory that is not empty, before any time is spent on the run."""
        try:
            str(path).encode()
            names = [entry.name for entry in path.iterdir()] if path.exists() else []
        except (OSError, ValueError) as error:
            raise UserError(f"output directory {shown(str(path))} cannot be used: {error}") from error
        if not all(re.fullmatch(BEGUN if IDENTITY in names else EMPTY, name) for name in names):
            how = "resume this run with --resume, " if IDENTITY in names else ""
            if how and not any(any(path.glob(begun)) for begun in ("metrics.jsonl", "checkpoints/*")):
                how = "its run has no steps yet: start it with --resume --allow-changed, "
            raise UserError(f"output directory {str(path)!r} is not empty; {how}choose another --output, or remove this one")

    @staticmethod
    def check_begun(path: Path) -> None:
        """Reject a directory that is not a run directory, before any time is spent on the run."""
        if not (path / "config.yaml").is_file():
            is_main = os.environ.get("RANK", "0") == "0"
            copy = f" on {socket.gethostname()}; copy config.yaml and plugins/ there from the machine with the run" * (
                not is_main
            )
            raise UserError(f"--resume: {str(path)!r} is not a run directory: it has no config.yaml{copy}")

    @classmethod
    def resume(cls, path: Path) -> RunDirectory:
        """Open the directory of a run and clean up after a process that was killed.

        Raises:
            UserError: there is no run, or another process holds the lock.
        """
        cls.check_begun(path)
        directory = cls(path)
        try:
            with writing(path):
                for name in FOLDERS:
                    (path / name).mkdir(exist_ok=True)
                checkpoints.tidy(path)
        except BaseException:
            directory.close()
            raise
        return directory

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line to ``metrics.jsonl`` and flush it to disk."""
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

    def save_rollouts(self, responses: Iterable[Mapping[str, Any]], step: RolloutFile) -> None:
        """Write the responses of a step as text and then as a rollout file, which marks the step as complete."""
        if not self.is_writer:
            return
        text = "".join(AS_LINE.encode(line) + "\n" for line in responses)
        texts = self.path / "rollouts" / f"{step.step:06d}.jsonl"
        with writing(texts, len(text)), replacing(texts, self.identity) as temporary:
            temporary.write_text(text, encoding="utf-8")
        file = texts.with_suffix(".safetensors")
        with writing(file, step.num_bytes):
            step.save(file, self.identity)

    def save_evaluation(self, step: int, rewards: Sequence[Sequence[float | None]]) -> None:
        """Write all rewards of an evaluation, by problem. None stands for a missing grade."""
        if self.is_writer:
            file = self.path / "evaluations" / f"{step:06d}.json"
            with writing(file):
                file.parent.mkdir(exist_ok=True)
            self._replace(file, json.dumps({"rewards": rewards}) + "\n")

    def summarise(self, facts: Mapping[str, object]) -> None:
        """Write ``summary.json``."""
        if not self.is_writer:
            return
        self._replace(self.path / "summary.json", json.dumps(facts, indent=2) + "\n")

    def allow_change(self, fingerprint: Mapping[str, Any]) -> None:
        """Write the fingerprint of a run that was allowed to resume with changes and that MLflow then tracks as a new run."""
        if self.is_writer:
            self._replace(self.path / IDENTITY, _run_facts(self.identity, fingerprint))
            (self.path / "tracking" / "record.json").unlink(missing_ok=True)

    def save_figure(self, name: str, write: Callable[[Path], object]) -> None:
        """Let ``write`` save an HTML page to ``figures/``, from which pages are logged to MLflow."""
        if not self.is_writer:
            return
        file = self.path / "figures" / name
        with writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(file, self.identity) as temporary:
                write(temporary)

    @contextmanager
    def checkpoint(
        self,
        step: int,
        model: PreTrainedModel,
        weights: Mapping[str, Tensor],
        tokenizer: PreTrainedTokenizerBase,
        policy: ClipPolicy,
        *,
        adapter: Mapping[str, Tensor] | None = None,
        keep: int = 1,
        scores: Mapping[int, float] | None = None,
    ) -> Iterator[Path]:
        """Write a checkpoint, to which the block can add files, and remove old checkpoints as `checkpoints.rotate` does.

        The folder holds the weights and the tokenizer for ``from_pretrained``, and ``clip.json`` with the settings of the
        rule, which include the state of an adaptive rule. A LoRA adapter is also saved separately in ``adapter/``. If the
        model is sharded, ``adapter`` contains its weights. The checkpoint gets its final name when the block ends.
        """
        folder = self.path / "checkpoints" / f"step-{step:06d}"
        temporary = temporary_path(folder, self.identity)
        if not self.is_writer:
            with writing(folder):
                yield temporary
            return
        try:
            with writing(folder, sum(tensor.nbytes for tensor in weights.values())):
                folder.parent.mkdir(exist_ok=True)
                save_model(temporary, model, weights, tokenizer)
                if has_adapter(model):
                    with quiet():
                        model.save_pretrained(temporary / "adapter", state_dict=None if adapter is None else dict(adapter))
                state = {"name": policy.name, **redact_settings(policy.model_dump(mode="json"))}
                (temporary / "clip.json").write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
                yield temporary
                follow_umask(temporary)
                seal(temporary)
                checkpoints.put_in_place(temporary, folder, self.path)
                sync(folder.parent)
                checkpoints.rotate(self.path, step, keep, scores or {})
        except Exception:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def cut_after(self, step: int) -> list[dict[str, float]]:
        """Move everything that the run wrote after a step to ``superseded/``, and return the metrics up to that step.

        Raises:
            UserError: ``metrics.jsonl`` is damaged or lacks a step up to ``step``.
        """
        file = self.path / "metrics.jsonl"
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
                self._replace(file, _as_lines(kept))
        return [{key: value for key, value in row.items() if key != "step"} for row in kept]

    def _supersede(self, step: int, rows: Sequence[Mapping[str, float]]) -> None:
        files = [file for name in ("rollouts", "evaluations") for file in (self.path / name).glob("[0-9]*")]
        later = [file for file in files if (match := STEP.fullmatch(file.name)) and int(match[1]) > step]
        if not rows and not later:
            return
        folders = (self.path / "superseded" / str(number) for number in itertools.count(1))
        folder = next(folder for folder in folders if not folder.exists())
        folder.mkdir(parents=True)
        self._replace(folder / "metrics.jsonl", _as_lines(rows))
        for file in later:
            (folder / file.parent.name).mkdir(exist_ok=True)
            shutil.move(file, folder / file.parent.name / file.name)  # `move` works across disks
        logger.info("moved everything that the run wrote after step %d to %s", step, folder)

    def _replace(self, file: Path, text: str) -> None:
        """Replace a file atomically and flush it to disk."""
        with writing(file, len(text)):
            write_text(file, text, self.identity)


def _run_facts(identity: str, fingerprint: Mapping[str, Any]) -> str:
    return json.dumps({"id": identity, "fingerprint": fingerprint}, indent=1) + "\n"


def _as_lines(rows: Iterable[Mapping[str, float]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def read_metrics(file: Path) -> list[dict[str, float]]:
    """Read the rows of a ``metrics.jsonl`` file. An incomplete last line is skipped.

    Raises:
        UserError: the file cannot be read, or a line does not hold the metrics of a step. The message gives the line number.
    """
    try:
        lines = read_text(file).split("\n")
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
        other = next((name for name, value in row.items() if type(value) not in (int, float)), None)
        if other is not None:
            raise UserError(f"{str(file)!r} line {number}: {shown(other)} is {shown(row[other])}, not a number")
        rows.append(row)
    return rows
