"""Recorded rollouts for replay, with the inputs to every update as the rule received them."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlzoo.config.composition import read_config
from rlzoo.config.run_config import RunConfig
from rlzoo.core import ops
from rlzoo.core.corrections import Correction, CorrectionInputs
from rlzoo.core.errors import UserError
from rlzoo.core.fairness import bin_edges
from rlzoo.core.policy import ClipPolicy
from rlzoo.core.reductions import StepCounts
from rlzoo.core.settings import user_path
from rlzoo.core.types import ClipInputs
from rlzoo.core.zoo import load_zoo
from rlzoo.journal.recorded import batch_of, rollout_files
from rlzoo.journal.rollout_file import RolloutFile
from rlzoo.learner.batch import Batch
from rlzoo.models.machine import available_memory

M_MMAP_THRESHOLD = -3  # from malloc.h
KEPT = 2**27  # a recording of at most this size in bytes stays in memory, or a larger one if there is plenty of memory


@dataclass(frozen=True, slots=True)
class RecordedUpdate:
    """One optimizer step."""

    step: int
    index: int  # index within the step, from 0
    edges: Tensor  # (K + 1,) length bins of the rollout batch, in tokens
    inputs: ClipInputs  # the rule's inputs for R responses
    batch: Batch  # all responses of the rollout step
    rows: Tensor  # (R,) int64, the responses' rows in `batch`
    counts: StepCounts  # divisors of the objectives; responses without a grade count too
    weights: Tensor | None = None  # (R, 1) or (R, T) weights for the objective, if the run used a mismatch correction


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """The updates of one run by rlzoo or another trainer, in order."""

    path: Path  # the run directory, or the first path given
    updates: Iterable[RecordedUpdate]  # if the files are larger than `KEPT` in total, every iteration reads them again
    num_responses: int  # across all updates; a response in two updates counts twice
    max_length: int  # maximum response length in tokens; if not recorded, the length of the longest response
    splits_prompts: bool  # whether an update contained only some of a prompt's responses
    rule: ClipPolicy | None  # the rule of the training run; None if rlzoo cannot build it
    problem: str  # reason why there is no rule
    trained_with: str  # name of the rule of the training run, or of the program that wrote the recording
    model: str  # name or path of the trained model, if it was recorded
    is_run_directory: bool
    config: RunConfig | None = None  # only for a run directory that was read with its own code

    @classmethod
    def read(cls, paths: Path | Sequence[Path], plugins: Sequence[str | Path] = (), *, own_code: bool = False) -> RecordedRun:
        """Read a run directory, or rollout files and folders that together form one run.

        Args:
            paths: paths to read.
            plugins: plugin files and folders that provide the rule and the correction, in addition to the installed plugins.
            own_code: whether to run the code that a run directory names: its plugins, its task and its reward.

        Raises:
            UserError: the recording is missing or damaged or has no updates, or its correction cannot be built.
        """
        paths = [user_path(path) for path in ([paths] if isinstance(paths, Path) else paths)]
        path, config = paths[0], None
        if is_run_directory := (path / "config.yaml").is_file():
            config = _config(path, plugins) if own_code else None
        files, found = rollout_files(paths), dict[int, Path | None]()  # by step; None for a file without updates
        longest, max_length, num_responses, splits_prompts, has_log_probs, names = 0, 0, 0, False, False, dict[str, None]()
        for file in files:
            step = RolloutFile.load(file)
            if step.step in found:
                raise UserError(f"two rollout files are for step {step.step}; pass the files of a single run")
            found[step.step] = file if step.updates else None
            has_log_probs |= step.rollout_log_probs is not None or step.old_log_probs is not None
            if not step.updates:
                continue
            if step.old_log_probs is None:
                raise UserError(f"step {step.step} in {str(path)!r} has no old_log_probs; `rlzoo rescore` computes them")
            names[str(step.rule.get("name", f"a rule of {step.writer or 'an unknown trainer'}"))] = None
            longest, max_length = max(longest, int(step.lengths.max())), max(max_length, step.max_length or 0)
            graded = torch.ones(len(step)) if step.rewards is None else ~step.rewards.isnan()
            num_responses += sum(int(graded[update.rows].sum()) for update in step.updates)
            splits_prompts |= _splits_prompts(step)
        learned = tuple(file for _, file in sorted(found.items()) if file)
        if not num_responses:
            advice = "; `rlzoo rescore` computes the log-probs under a later checkpoint, so that rules can be compared on them"
            raise UserError(f"{str(path)!r} has no recorded updates to replay{advice if has_log_probs else ''}")
        first = RolloutFile.load(learned[0])
        rule, correction, problem = (config.clip, config.correction, "") if config else _plugins_of(path, first.rule, plugins)
        if len(names) > 1:
            rule, problem = None, f"{str(path)!r} was trained with several rules, {', '.join(names)}"
        is_large = sum(file.stat().st_size for file in files) > max(KEPT, available_memory() // 32)
        if is_large and platform.libc_ver()[0] == "glibc":  # otherwise, freed tensors leave gaps that it does not reuse
            ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)
        updates: Iterable[RecordedUpdate] = _Updates(path, learned, max_length or longest, correction)
        return cls(
            path=path,
            updates=updates if is_large else tuple(updates),
            num_responses=num_responses,
            max_length=max_length or longest,
            splits_prompts=splits_prompts,
            rule=rule,
            problem=problem,
            trained_with=", ".join(names),
            model=first.model,
            is_run_directory=is_run_directory,
            config=config,
        )

    @property
    def own_rule(self) -> ClipPolicy:
        """The training run's rule with its settings; raises `UserError` if it was not recorded or cannot be built."""
        if self.rule is None:
            raise UserError(self.problem)
        return self.rule


@dataclass(frozen=True, slots=True)
class _Updates:
    """The updates in some rollout files; every iteration reads the files again, one by one."""

    path: Path
    files: tuple[Path, ...]
    max_length: int
    correction: Correction | None

    def __iter__(self) -> Iterator[RecordedUpdate]:
        for file in self.files:
            yield from _updates(self.path, RolloutFile.load(file), self.max_length, self.correction)


def _config(run: Path, plugins: Sequence[str | Path]) -> RunConfig:
    try:
        return RunConfig.compose([run / "config.yaml"], plugins=plugins, use_changed_plugins=False)
    except UserError as error:
        raise UserError(f"{str(run)!r} has a config.yaml that is not a valid run configuration: {error}") from error


def _plugins_of(
    path: Path, recorded_rule: Mapping[str, Any], plugins: Sequence[str | Path]
) -> tuple[ClipPolicy | None, Correction | None, str]:
    """Without running a recording's code, return its rule and correction, and the reason if there is no rule."""
    file, zoo = path / "config.yaml", load_zoo(plugins)
    settings = read_config(file) if file.is_file() else {"clip": recorded_rule, "correction": None}
    correction, advice = settings.get("correction", "auto"), "to use a plugin that you trust, add --plugin FILE"
    try:
        built = None if correction in (None, "none") else zoo.corrections.build("correction", correction)
    except UserError as error:
        raise UserError(f"{str(path)!r} was trained with another correction: {error}; {advice}") from error
    if not settings.get("clip"):
        return None, built, "no rule from the zoo was recorded"
    try:
        return zoo.build("clip", settings["clip"]), built, ""
    except UserError as error:
        return None, built, f"{error}" if "--plugin" in str(error) else f"{error}; {advice}"


def _updates(path: Path, step: RolloutFile, max_length: int, correction: Correction | None) -> Iterator[RecordedUpdate]:
    """Yield the updates of one step, with the inputs that the rule received."""
    batch, rows_of_step = batch_of(step), torch.arange(len(step))
    assert step.old_log_probs is not None, "checked by the caller"
    old = batch.scatter(rows_of_step, step.old_log_probs)
    sampled = None if step.rollout_log_probs is None else batch.rollout_log_probs
    advantages = _advantages(path, step, batch)
    per_token = {name: value for name in ("old_entropy", "ref_log_probs") if (value := getattr(step, name)) is not None}
    per_response = {name: value for name in ("rewards", "finished", "group_ids") if (value := getattr(step, name)) is not None}
    optional = {
        **{name: batch.scatter(rows_of_step, value) for name, value in per_token.items()},
        **{name: value[:, None] for name, value in per_response.items()},
        **({} if sampled is None else {"rollout_log_probs": sampled}),
        "turn_ids": batch.turn_ids,
        "token_ids": batch.token_ids,
    }
    weights = None
    if correction and sampled is not None:
        weights = correction(CorrectionInputs(old, sampled, batch.response_mask, advantages))
    edges = bin_edges(step.lengths[step.lengths > 0])
    for index, update in enumerate(step.updates):
        graded = batch.graded[update.rows]
        if not graded.any():
            continue
        rows = update.rows[graded]
        of_rows: dict[str, Any] = {name: values[rows] for name, values in optional.items()}
        inputs = ClipInputs(
            log_probs=batch.scatter(update.rows, update.log_probs)[graded],
            old_log_probs=old[rows],
            advantages=advantages[rows],
            response_mask=batch.response_mask[rows],
            seed=step.seed + index,
            max_length=max_length,
            progress=_progress(step, index),
            **of_rows,
        )
        mask = torch.zeros_like(batch.response_mask).index_copy(0, update.rows, batch.response_mask[update.rows])
        counts = StepCounts.of(mask, batch.group_ids[:, None]).select(rows)
        weights_of_rows = None if weights is None else weights[rows]
        yield RecordedUpdate(step.step, index, edges, inputs, batch, rows, counts, weights_of_rows)


def _progress(step: RolloutFile, index: int) -> float | None:
    if step.num_steps is None:
        return None
    return min((max(step.step - 1, 0) + index / len(step.updates)) / step.num_steps, 1.0)


def _advantages(path: Path, step: RolloutFile, batch: Batch) -> Tensor:
    """Return the recorded advantages, ``(R, 1)`` or ``(R, T)``. If there are none, use rewards minus prompt means."""
    if step.advantages is not None:
        is_per_response = len(step.advantages) == len(step)
        return step.advantages[:, None] if is_per_response else batch.scatter(torch.arange(len(step)), step.advantages)
    if step.rewards is None:
        raise UserError(f"step {step.step} in {str(path)!r} has neither advantages nor rewards; record one of them")
    graded = batch.graded
    advantages = torch.zeros(len(step), 1)
    advantages[graded] = ops.group_centred(step.rewards[graded, None].double(), step.group_ids[graded, None]).float()
    return advantages


def _splits_prompts(step: RolloutFile) -> bool:
    """Whether an update contained some but not all of the trained responses to a prompt."""
    groups = torch.unique(step.group_ids, return_inverse=True)[1]
    learned = torch.unique(torch.cat([update.rows for update in step.updates]))
    sizes = torch.bincount(groups[learned], minlength=len(step))
    counts = [torch.bincount(groups[update.rows], minlength=len(step)) for update in step.updates]
    return any(bool(((count > 0) & (count != sizes)).any()) for count in counts)
