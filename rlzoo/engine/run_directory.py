"""The run directory: complete configuration, metrics, recorded rollouts and checkpoints of one run."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor

from rlzoo.engine.adapters import has_adapter
from rlzoo.engine.manifest import seal, sync
from rlzoo.engine.pretrained import quiet
from rlzoo.errors import UserError, shown
from rlzoo.lock import Lock
from rlzoo.parsing import UnreadableError, parse_json
from rlzoo.reading import RECORDS, read_text
from rlzoo.redaction import redact_settings
from rlzoo.types import RolloutGroup

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rlzoo.engine.experience import Experience
    from rlzoo.engine.learner import Update
    from rlzoo.policy import ClipPolicy


AS_LINE = json.JSONEncoder(ensure_ascii=False)
CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO, errno.EFBIG)


def why_not_written(error: Exception) -> str | None:
    """What keeps a file from being written, such as a full disk; None for an error of another kind."""
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{where}" if error.errno in CANNOT_WRITE else None
    found = re.search(r"(?:.*: )?(.*) \(os error (\d+)\)", str(error))  # of safetensors, which is written in Rust
    return found[1] if found and int(found[2]) in CANNOT_WRITE else None


class RunDirectory:
    """Where a run leaves everything; created empty, never over another run, and written by one process at a time.

    Example:
        ``RunDirectory.create(Path("runs/mine"), config.to_yaml()).log(1, {"reward/mean": 0.5})``
    """

    def __init__(self, path: Path, is_writer: bool = True) -> None:
        self.path = path
        self.is_writer = is_writer  # of several processes, one writes; the others' calls do nothing
        self._lock = Lock(path) if is_writer else None

    def close(self) -> None:
        """Let another process write here."""
        if self._lock is not None:
            self._lock.release()

    @classmethod
    def create(cls, path: Path, config_yaml: str, plugins: Sequence[str] = (), *, is_writer: bool = True) -> RunDirectory:
        """Make the directory, write ``config.yaml``, and keep copies of the plugin files the run was started with.

        Raises:
            UserError: the directory holds something already, or cannot be written.
        """
        if not is_writer:
            return cls(path, is_writer)
        cls.check_free(path)
        made = path.with_name(f".{path.name}.part")  # stands under its name once it is complete
        try:
            shutil.rmtree(made, ignore_errors=True)
            (made / "rollouts").mkdir(parents=True)
            (made / "checkpoints").mkdir()
            (made / "config.yaml").write_text(config_yaml, encoding="utf-8")
            for plugin in map(Path, plugins):
                copy = shutil.copytree if plugin.is_dir() else shutil.copy2
                (made / "plugins").mkdir(exist_ok=True)
                copy(plugin, made / "plugins" / plugin.name)
            made.replace(path)
        except OSError as error:
            raise UserError(f"output directory {str(path)!r} cannot be written: {error.strerror or error}") from error
        return cls(path)

    @staticmethod
    def check_free(path: Path) -> None:
        """Refuse a directory that holds something already, before any time is spent on the run."""
        try:
            taken = path.is_dir() and any(path.iterdir())
        except (OSError, ValueError) as error:
            raise UserError(f"output directory {shown(str(path))} cannot be used: {error}") from error
        if taken:
            raise UserError(f"output directory {str(path)!r} is not empty; name another with --output, or remove it")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line to ``metrics.jsonl``, on the disk before this returns."""
        if not self.is_writer:
            return
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def record_rollouts(
        self, step: int, groups: Sequence[RolloutGroup], experience: Experience, updates: Sequence[Update]
    ) -> None:
        """Keep a step's responses as text, and its token ids and log-probs at every optimizer step, for replay.

        Per-token arrays are flat, response after response; ``lengths`` cuts them; ``advantages`` is one where they differ by
        token, else a column. ``log_probs/<u>`` belongs to the rows in ``rows/<u>``. Tensor ``rewards`` is the shaped one.
        """
        if not self.is_writer:
            return
        lines = (
            {
                "group": index,
                "question": group.problem.question,
                "answer": group.problem.answer,
                "response": rollout.text,
                "length": len(rollout.response_ids),
                "reward": rollout.reward,
                "finished": rollout.finished,
                "policy_version": rollout.policy_version,
            }
            for index, group in enumerate(groups)
            for rollout in group.rollouts
        )
        text = "".join(AS_LINE.encode(line) + "\n" for line in lines)
        mask, old, advantages = experience.response_mask, experience.old_log_probs, experience.advantages
        tensors = {
            "sequences": torch.cat(experience.sequences),
            "sequence_lengths": torch.tensor(experience.sizes),
            "lengths": experience.lengths,
            "group_ids": experience.group_ids,
            "rewards": experience.rewards,
            "advantages": advantages if advantages.shape[-1] == 1 else advantages[mask],
            "rollout_log_probs": experience.rollout_log_probs[mask],
        }
        tensors |= {} if old is None else {"old_log_probs": old[mask]}
        for index, update in enumerate(updates):
            tensors[f"rows/{index}"] = update.rows.contiguous()
            tensors[f"log_probs/{index}"] = update.log_probs[mask[update.rows]]
        stem = self.path / "rollouts" / f"{step:06d}"
        temporary = stem.with_name(".part")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(stem.with_suffix(".jsonl"))
        save_file(tensors, temporary)
        temporary.replace(stem.with_suffix(".safetensors"))  # with it the step counts as recorded

    def save_weights(self, step: int, update: int, weights: Mapping[str, Tensor]) -> None:
        """Keep the weights that one update starts from, so that replay can differentiate through them."""
        if not self.is_writer:
            return
        folder = self.path / "replay"
        folder.mkdir(exist_ok=True)
        save_file(dict(weights), folder / f"{step:06d}-{update}.safetensors")

    def summarise(self, facts: Mapping[str, object]) -> None:
        """Write ``summary.json``: whether the run is over, and what it took."""
        if not self.is_writer:
            return
        temporary = self.path / ".summary.json.part"
        temporary.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        temporary.replace(self.path / "summary.json")

    def save_figure(self, figure: Figure, name: str) -> None:
        """Keep a picture under ``figures/``, which MLflow is sent."""
        if not self.is_writer:
            return
        file = self.path / "figures" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(".part")
        figure.savefig(temporary, format="png")
        temporary.replace(file)

    def begin_checkpoint(
        self,
        name: str,
        model: PreTrainedModel,
        weights: Mapping[str, Tensor],
        tokenizer: PreTrainedTokenizerBase,
        policy: ClipPolicy,
    ) -> Path:
        """Write weights and tokenizer for ``from_pretrained``; returns the folder, to which more may be added.

        The policy's settings stand beside them in ``clip.json``: those of an adaptive one are its state. Of a low-rank
        update there is also the adapter alone, in ``adapter/``. Nothing of it counts before `finish_checkpoint`.
        """
        temporary = self.path / "checkpoints" / f".{name}.part"
        if not self.is_writer:
            return temporary
        shutil.rmtree(temporary, ignore_errors=True)
        with torch.device("meta"):
            skeleton = type(model)(model.config)  # without weights of its own, without adapters
        skeleton.generation_config = model.generation_config
        with quiet():
            skeleton.save_pretrained(temporary, state_dict=dict(weights))
            tokenizer.save_pretrained(temporary)
            if has_adapter(model):
                model.save_pretrained(temporary / "adapter")
        state = {"name": policy.name, **redact_settings(policy.model_dump(mode="json"))}
        (temporary / "clip.json").write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        return temporary

    def finish_checkpoint(self, temporary: Path, keep: int, scores: Mapping[int, float] | None = None) -> None:
        """Seal it, let it stand under its name, and drop all but the last ``keep`` and, of steps with a score, the best."""
        if not self.is_writer:
            return
        seal(temporary)
        folder = temporary.with_name(temporary.name.removeprefix(".").removesuffix(".part"))
        former = folder.with_name(f".{folder.name}.former")
        if folder.exists():
            folder.replace(former)
        temporary.replace(folder)
        sync(folder.parent)
        shutil.rmtree(former, ignore_errors=True)
        saved = sorted((path for path in folder.parent.iterdir() if not path.name.startswith(".")), key=lambda p: p.name)
        scored = {f"step-{step:06d}": score for step, score in (scores or {}).items()}
        best = max((path.name for path in saved if path.name in scored), key=lambda name: (scored[name], name), default="")
        for old in saved[:-keep]:
            if old.name != best:
                shutil.rmtree(old)

    def cut_after(self, step: int) -> list[dict[str, float]]:
        """Forget what a run wrote after this step; returns the metrics of the steps that are left.

        Raises:
            UserError: ``metrics.jsonl`` is damaged.
        """
        file = self.path / "metrics.jsonl"
        # the last line may have been cut off by what ended the run
        rows = [row for row in read_metrics(file) if row["step"] <= step] if file.exists() else []
        if self.is_writer:
            for unfinished in (self.path / "checkpoints").glob(".*"):
                shutil.rmtree(unfinished)
            temporary = self.path / ".metrics.jsonl.part"
            temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            temporary.replace(file)
            for recorded in (self.path / "rollouts").iterdir():
                if recorded.is_file() and (recorded.name.startswith(".") or _is_after(recorded.stem, step)):
                    recorded.unlink()
        return [{key: value for key, value in row.items() if key != "step"} for row in rows]


def _is_after(stem: str, step: int) -> bool:
    return stem.isascii() and stem.isdecimal() and int(stem[:18]) > step  # what is named otherwise is not the run's


def read_metrics(file: Path) -> list[dict[str, float]]:
    """The rows of a ``metrics.jsonl``: a step and numbers. A last line that was not finished is left out.

    Raises:
        UserError: it cannot be read, or a line is something else; names the line.
    """
    try:
        lines = read_text(file, RECORDS).split("\n")
    except (OSError, ValueError) as error:
        raise UserError(f"{str(file)!r} cannot be read: {error}") from error
    rows = []
    for number, line in enumerate(lines[:-1], start=1):  # after the last newline is what was being written
        try:
            row = parse_json(line)
        except UnreadableError as error:
            raise UserError(f"{str(file)!r} line {number}: not JSON: {error}") from error
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            raise UserError(f"{str(file)!r} line {number}: {shown(row)} is no row of metrics with a step")
        other = next((key for key, value in row.items() if type(value) not in (int, float)), None)
        if other is not None:
            raise UserError(f"{str(file)!r} line {number}: {shown(other)} is {shown(row[other])}, not a number")
        rows.append(row)
    return rows
