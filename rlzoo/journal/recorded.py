"""The ``recorded`` engine, which takes a run's batches from rollout files and samples only for evaluations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from rlzoo.config.engines import engine_of
from rlzoo.core.errors import UserError
from rlzoo.core.settings import user_path
from rlzoo.journal.rollout_file import RolloutFile, turns
from rlzoo.learner.batch import Batch
from rlzoo.rollout.hf_engine import HF
from rlzoo.rollout.kept import KeptSets
from rlzoo.rollout.rollouts import Rollouts, Sampled
from rlzoo.rollout.types import Rollout, RolloutGroup, Turn
from rlzoo.tasks.problem import Problem


def rollout_files(paths: Sequence[Path]) -> list[Path]:
    """Return the rollout files among the given paths, including those in run directories and other folders.

    Args:
        paths: files and folders. In a run directory, only ``rollouts`` is searched. In other folders, subfolders are ignored.

    Raises:
        UserError: a path does not exist, or a folder contains no rollout file.
    """
    files: list[Path] = []
    for path in map(user_path, paths):
        if path.is_dir():
            is_run = (path / "config.yaml").is_file()
            folder = path / "rollouts" if is_run and (path / "rollouts").is_dir() else path
            # skip hidden files such as macOS's ._000001.safetensors
            in_folder = [file for file in sorted(folder.glob("*.safetensors")) if not file.name.startswith(".")]
            if not in_folder:
                problem = "has no recorded rollouts" if is_run else "is neither a run directory nor a folder with rollout files"
                raise UserError(f"{str(path)!r} {problem} (*.safetensors)")
            files += in_folder
        elif path.exists():
            files.append(path)
        else:
            raise UserError(f"{str(path)!r} does not exist; pass a run directory, rollout files, or a folder of rollout files")
    return files


@dataclass(frozen=True, slots=True)
class Recording:
    """Facts about the rollout files that a run trains on."""

    files: tuple[Path, ...]  # in the order of their steps
    largest: dict[str, Any]  # settings and sizes, each from the file in which it is largest
    absent: frozenset[str]  # tensors that at least one file lacks
    models: frozenset[str]  # the models that generated the responses, if the files name them
    prompts: frozenset[int]  # hashes of the prompts' tokens


@lru_cache(maxsize=4)
def _recording(path: str, files: tuple[tuple[Path, int, int], ...]) -> Recording:
    """Read the files, or reuse the result if their times and sizes are unchanged. All files must come from the same run."""
    by_step: dict[int, Path] = {}
    absent, models, prompts, largest = set[str](), set[str](), set[int](), dict[str, Any]()
    for file, *_ in files:
        step = RolloutFile.load(file)
        is_other = by_step.setdefault(step.step, file) != file
        if is_other or largest.get("temperature", step.temperature) != step.temperature:
            problem = f"two files are for step {step.step}" if is_other else "temperatures differ between the files"
            raise UserError(f"rollout.recorded={path!r}: {problem}; use the files of a single run")
        groups = torch.unique(step.group_ids, return_counts=True)[1]
        sizes = {
            "num_prompts": len(groups),
            "group_size": int(groups.max()),
            "temperature": float(step.temperature),
            "max_new_tokens": max(step.max_length or 1, int(step.lengths.max())),
            "prompt": int(step.prompt_lengths.max()),  # length in tokens
            "row": int(step.sequence_lengths.max()),  # length of a prompt with its response, in tokens
            "token_id": max(int(ids.max()) for ids in (step.token_ids, step.kept_ids) if ids is not None and len(ids)),
            "kept": 0 if step.kept_sizes is None else max(step.kept_sizes.tolist(), default=0),  # tokens, under top-k and top-p
        }
        largest = {name: max(size, largest.get(name, size)) for name, size in sizes.items()}
        absent |= {name for name in ("rewards", "rollout_log_probs", "finished") if getattr(step, name) is None}
        models |= {step.model} - {""}
        sequences = torch.split(step.token_ids, step.sequence_lengths.tolist())
        prompts |= {hash(tuple(row[:size].tolist())) for row, size in zip(sequences, step.prompt_lengths, strict=True)}
    in_order = tuple(file for _, file in sorted(by_step.items()))
    return Recording(in_order, largest, frozenset(absent), frozenset(models), frozenset(prompts))


class Recorded(HF):
    """Takes batches from rollout files and samples with the model only for evaluations."""

    @property
    def recording(self) -> Recording | None:
        """See `rlzoo.config.engines.Engine`."""
        if (path := self.rollout.recorded) is None:
            return None
        stats = ((file, file.stat()) for file in rollout_files([Path(path)]))
        return _recording(path, tuple((file, stat.st_mtime_ns, stat.st_size) for file, stat in stats))

    def settled(self) -> Any:
        """See `Engine.settled`."""
        rollout, recording = self.rollout, self.recording
        if recording is None:
            raise UserError("rollout.engine=recorded: set rollout.recorded to a run directory or a rollout file")
        names, kept = ("num_prompts", "group_size", "temperature", "max_new_tokens"), recording.largest["kept"]
        values = {name: recording.largest[name] for name in names} | {"dynamic_sampling": 0, "max_staleness": 0}
        values |= {} if 0 < kept <= (rollout.top_k or kept) else {"top_k": None, "top_p": 1.0}
        for name in sorted(rollout.model_fields_set & values.keys()):
            if (stated := getattr(rollout, name)) != values[name]:
                raise UserError(f"rollout.{name}={stated}: must be {values[name]} for {rollout.recorded!r}; remove the setting")
        return rollout.model_copy(update=values)


class RecordedRollouts(Rollouts):
    """Takes the batches of a run from rollout files and evaluates as `Rollouts` does."""

    def take(self, step: int, newest: Callable[[], int]) -> Sampled:
        """Return the batch of one step. Step s trains on the s-th file, and the files repeat after the last one."""
        files = engine_of(self.config.rollout).recording.files
        recorded = RolloutFile.load(files[(step - 1) % len(files)])
        self.next_problem = step
        groups = groups_of(recorded, self.sampler.text)
        unknown = {name: None for name in ("rollout_log_probs", "finished") if getattr(recorded, name) is None}
        unknown["policy_versions"] = None  # the versions in the file are those of another run
        failed = [rollout.reward is None for group in groups for rollout in group.rollouts]
        return Sampled(groups, 1, 0, sum(failed) / len(failed), unknown=unknown)


def groups_of(step: RolloutFile, text: Callable[[Sequence[int]], str]) -> list[RolloutGroup]:
    """Return the responses to each prompt of a recorded step. ``text`` decodes tokens."""
    batch, groups = batch_of(step), dict[int, list[Rollout]]()
    for row, (ids, start) in enumerate(zip(batch.sequences, batch.prompt_lengths.tolist(), strict=True)):
        response_ids, kept = tuple(ids[start:].tolist()), batch.kept_of(torch.tensor([row]))
        turn_ids, reward = batch.turn_ids[row, : len(response_ids)], float(batch.rewards[row])
        if kept is not None:  # the environment's tokens have empty sets
            sizes = torch.zeros(len(response_ids), dtype=torch.int32).masked_scatter(turn_ids >= 0, kept.sizes)
            kept = KeptSets(kept.ids, sizes)
        rollout = Rollout(
            prompt_ids=tuple(ids[:start].tolist()),
            response_ids=response_ids,
            rollout_log_probs=tuple(batch.rollout_log_probs[row, : len(response_ids)].tolist()),
            text=text(response_ids),
            finished=bool(batch.finished[row]),
            policy_version=0,
            reward=None if math.isnan(reward) else reward,
            turns=_turns(response_ids, turn_ids, text),
            kept=kept,
        )
        groups.setdefault(int(batch.group_ids[row]), []).append(rollout)
    return [RolloutGroup(Problem(text(group[0].prompt_ids), ""), tuple(group)) for group in groups.values()]


def _turns(ids: Sequence[int], turn_ids: Tensor, text: Callable[[Sequence[int]], str]) -> tuple[Turn, ...]:
    """Return a response's turns without their rewards, or no turns if the model wrote the whole response in one turn."""
    values, sizes = torch.unique_consecutive(turn_ids, return_counts=True)
    ends = sizes.cumsum(0)
    starts, stops = ((places[values >= 0]).tolist() for places in (ends - sizes, ends))
    if (starts, stops) in (([], []), ([0], [len(ids)])):
        return ()
    spans = zip(starts, stops, [*starts[1:], len(ids)], strict=True)
    return tuple(Turn(start, stop, text(ids[start:stop]), text(ids[stop:after]), None) for start, stop, after in spans)


def batch_of(step: RolloutFile) -> Batch:
    """Return the responses of a step in the learner's layout. Log-probs that the sampler did not report are NaN."""
    turn_ids, reported = _turn_ids(step), step.rollout_log_probs
    reported = torch.full_like(turn_ids[turn_ids >= 0], torch.nan, dtype=torch.float32) if reported is None else reported
    return Batch(
        step=step.step,
        sequences=torch.split(step.token_ids, step.sequence_lengths.tolist()),
        prompt_lengths=step.prompt_lengths,
        response_mask=turn_ids >= 0,
        turn_ids=turn_ids,
        rollout_log_probs=torch.zeros(turn_ids.shape).masked_scatter(turn_ids >= 0, reported),
        rewards=torch.zeros(len(step)) if step.rewards is None else step.rewards,
        group_ids=step.group_ids,
        finished=torch.ones(len(step), dtype=torch.bool) if step.finished is None else step.finished,
        kept=None if step.kept_ids is None or step.kept_sizes is None else KeptSets(step.kept_ids, step.kept_sizes),
    )


def _turn_ids(step: RolloutFile) -> Tensor:
    """Return the turn of each token after the prompt, ``(R, T)``, or -1 for tokens that the model did not generate."""
    rows = zip(torch.split(step.response_mask, step.sequence_lengths.tolist()), step.prompt_lengths.tolist(), strict=True)
    mask = pad_sequence([row[start:] for row, start in rows], batch_first=True)
    mask = mask if mask.shape[1] else pad(mask, (0, 1))  # no response has tokens
    if step.turn_ids is not None:
        return torch.full(mask.shape, -1).masked_scatter(mask, step.turn_ids)
    return turns(mask)
