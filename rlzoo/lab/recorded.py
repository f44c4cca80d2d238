"""Recorded rollouts for replay: the inputs to every update, as the rule received them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

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
from rlzoo.journal.rollout_file import RolloutFile, turns
from rlzoo.learner.batch import Batch
from rlzoo.rollout.kept import RaggedSets

LONGEST_STEP = 9  # maximum number of digits of the step in a file name


@dataclass(frozen=True, slots=True)
class RecordedUpdate:
    """One optimizer step."""

    step: int
    index: int  # within the step, from 0
    edges: Tensor  # (K + 1,) length bins of the rollout batch, in tokens
    inputs: ClipInputs
    group: Tensor  # (R,) int64, index of each response's prompt within the step
    sequences: tuple[Tensor, ...]  # R ragged rows of prompt and response token ids
    counts: StepCounts  # by which objectives are divided; includes responses without a grade
    weights: Tensor | None = None  # (R, 1) or (R, T) weights for the objective, if the run used a mismatch correction
    kept: RaggedSets | None = None  # token ids that top-k or top-p kept for each token that the model chose, row by row

    def weights_for(self, policy: ClipPolicy) -> Tensor | None:
        """Return the weights for a rule's objective; None if the rule's ratio is already relative to the sampler."""
        return None if policy.ratio_to_sampler else self.weights


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """The updates of one run of rlzoo or of another trainer, in order."""

    path: Path  # the run directory, or the first path given
    steps: tuple[RolloutFile, ...]
    updates: tuple[RecordedUpdate, ...]
    max_length: int  # maximum response length in tokens; if not recorded, length of the longest response
    splits_prompts: bool  # whether an update contained only some of a prompt's responses
    rule: ClipPolicy | None  # the rule of the training run; None if rlzoo cannot build it
    problem: str  # why there is no rule
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
            UserError: there is no recording, it is damaged, or it has no updates; or its correction cannot be built.
        """
        paths = [user_path(path) for path in ([paths] if isinstance(paths, Path) else paths)]
        path, config = paths[0], None
        if is_run_directory := (path / "config.yaml").is_file():
            if len(paths) > 1:
                raise UserError(
                    f"{len(paths)} paths were given, but {str(path)!r} is a run directory; pass only that directory"
                )
            config = _config(path) if own_code else None
            folder = path / "rollouts"
            files = rollout_files([folder], named_by_step=True) if folder.is_dir() else []
        else:
            files = rollout_files(paths)
        steps = sorted((RolloutFile.load(file) for file in files), key=lambda each: each.step)
        for before, after in itertools.pairwise(steps):
            if before.step == after.step:
                raise UserError(f"two rollout files are for step {after.step}; pass the files of a single run")
        learned = [each for each in steps if each.updates]
        if not learned:
            raise UserError(_without_updates(path, steps))
        if without := next((each for each in learned if each.old_log_probs is None), None):
            raise UserError(f"step {without.step} in {str(path)!r} has no old_log_probs; `rlzoo rescore` computes them")
        names = {str(each.rule.get("name", "a rule of another trainer")) for each in steps}
        if len(names) > 1:
            raise UserError(
                f"the steps in {str(path)!r} were trained with {' and '.join(sorted(names))}; pass the files of a single run"
            )
        limits = {each.max_length for each in learned} - {None}
        max_length = max((limit for limit in limits if limit), default=max(int(each.lengths.max()) for each in learned))
        rule, correction, problem = (config.clip, config.correction, "") if config else _parts(path, learned[0], plugins)
        updates = tuple(update for each in learned for update in _updates(path, each, max_length, correction))
        splits = any(_splits_prompts(each) for each in learned)
        return cls(path, tuple(steps), updates, max_length, splits, rule, problem, is_run_directory, config)

    @property
    def num_responses(self) -> int:
        """The number of responses across all updates; a response in two updates counts twice."""
        return sum(len(update.group) for update in self.updates)

    @property
    def own_rule(self) -> ClipPolicy:
        """The rule of the training run, with its settings; raises `UserError` if it was not recorded or cannot be built."""
        if self.rule is None:
            raise UserError(self.problem)
        return self.rule

    @property
    def trained_with(self) -> str:
        """The name of the training run's rule, or of the program that wrote the recording."""
        first = self.steps[0]
        return str(first.rule["name"]) if first.rule else f"a rule of {first.writer or 'an unknown trainer'}"


def rollout_files(paths: Sequence[Path], *, named_by_step: bool = False) -> list[Path]:
    """Return the rollout files among the given paths, including those in run directories and other folders.

    Args:
        paths: files and folders. In a run directory, only ``rollouts`` is searched. In other folders, subfolders are ignored.
        named_by_step: reject files whose names do not have the form ``STEP.safetensors``, such as ``000001.safetensors``.

    Raises:
        UserError: a path does not exist, or a folder has no rollout file.
    """
    found: list[Path] = []
    for given in map(user_path, paths):
        path = given
        if given.is_dir():
            path = given / "rollouts" if (given / "config.yaml").is_file() and (given / "rollouts").is_dir() else given
            # skip hidden files such as macOS's ._000001.safetensors
            inside = [file for file in sorted(path.glob("*.safetensors")) if not file.name.startswith(".")]
            if not inside and not named_by_step:
                raise UserError(f"{str(path)!r} is neither a run directory nor a folder with rollout files (*.safetensors)")
            found += inside
        elif path.exists():
            found.append(path)
        else:
            raise UserError(f"{str(path)!r} does not exist; pass a run directory, rollout files, or a folder of rollout files")
    for file in found:
        stem = file.stem
        if named_by_step and not (stem.isdecimal() and stem.isascii() and len(stem) <= LONGEST_STEP):
            raise UserError(
                f"{str(file)!r}: expected a name of the form STEP.safetensors, such as 000001.safetensors; remove it"
            )
    return found


def batch_of(step: RolloutFile) -> Batch:
    """Return the responses of a step in the learner's layout, for another forward pass."""
    turn_ids = _turn_ids(step)
    mask = turn_ids >= 0
    sampled, rewards, finished = step.rollout_log_probs, step.rewards, step.finished
    return Batch(
        step=step.step,
        sequences=torch.split(step.token_ids, step.sequence_lengths.tolist()),
        prompt_lengths=step.prompt_lengths,
        response_mask=mask,
        turn_ids=turn_ids,
        rollout_log_probs=torch.zeros(mask.shape) if sampled is None else _spread(sampled, mask),
        rewards=torch.zeros(len(step)) if rewards is None else rewards,
        group_ids=step.group_ids,
        finished=torch.ones(len(step), dtype=torch.bool) if finished is None else finished,
        kept=None if step.kept_ids is None or step.kept_sizes is None else RaggedSets(step.kept_ids, step.kept_sizes.long()),
    )


def _config(run: Path) -> RunConfig:
    try:
        return RunConfig.compose([run / "config.yaml"], use_changed_plugins=False)
    except UserError as error:
        raise UserError(f"{str(run)!r} has a config.yaml that is not a valid run configuration: {error}") from error


def _without_updates(path: Path, steps: Sequence[RolloutFile]) -> str:
    what = f"{str(path)!r} has no recorded updates to replay"
    if any(each.rollout_log_probs is not None or each.old_log_probs is not None for each in steps):
        what += "; `rlzoo rescore` computes the log-probs under a later checkpoint, so that rules can be compared on them"
    return what


def _parts(path: Path, step: RolloutFile, plugins: Sequence[str | Path]) -> tuple[ClipPolicy | None, Correction | None, str]:
    """Return the rule and the correction of a recording without its own code, and why there is no rule."""
    file, zoo = path / "config.yaml", load_zoo(plugins)
    settings = read_config(file) if file.is_file() else {"clip": step.rule, "correction": None}
    correction, advice = settings.get("correction", "auto"), "to use a plugin that you trust, add --plugin FILE"
    try:
        corrects = None if correction in (None, "none") else zoo.corrections.build("correction", correction)
    except UserError as error:
        raise UserError(f"{str(path)!r} was trained with another correction: {error}; {advice}") from error
    if not settings.get("clip"):
        return None, corrects, "no rule from the zoo was recorded"
    try:
        return zoo.build("clip", settings["clip"]), corrects, ""
    except UserError as error:
        return None, corrects, f"{error}; {advice}"


def _updates(path: Path, step: RolloutFile, max_length: int, correction: Correction | None) -> Iterator[RecordedUpdate]:
    """Yield the updates of one step, with the inputs that the rule received."""
    sequences = torch.split(step.token_ids, step.sequence_lengths.tolist())
    turn_ids = _turn_ids(step)
    mask = turn_ids >= 0
    starts = step.prompt_lengths.tolist()
    behind = pad_sequence([row[start:] for row, start in zip(sequences, starts, strict=True)], batch_first=True)
    assert step.old_log_probs is not None, "checked by the caller"
    old = _spread(step.old_log_probs, mask)
    sampled = None if step.rollout_log_probs is None else _spread(step.rollout_log_probs, mask)
    advantages = _advantages(path, step, mask)
    per_token = {name: value for name in ("old_entropy", "ref_log_probs") if (value := getattr(step, name)) is not None}
    per_response = {name: value for name in ("rewards", "finished", "group_ids") if (value := getattr(step, name)) is not None}
    optional = {
        **{name: _spread(value, mask) for name, value in per_token.items()},
        **{name: value[:, None] for name, value in per_response.items()},
        "turn_ids": turn_ids,
        "token_ids": behind * mask,
    }
    weights = None
    if correction and sampled is not None:
        weights = correction(CorrectionInputs(old, sampled, mask, advantages))
    edges, batch = bin_edges(step.lengths[step.lengths > 0]), batch_of(step)
    for index, update in enumerate(step.updates):
        graded = batch.graded[update.rows]
        if not graded.any():
            continue
        rows, counts = update.rows[graded], StepCounts.of(mask[update.rows])
        of_rows: dict[str, Any] = {name: values[rows] for name, values in optional.items()}
        yield RecordedUpdate(
            step.step,
            index,
            edges,
            ClipInputs(
                log_probs=_spread(update.log_probs, mask[update.rows])[graded],
                old_log_probs=old[rows],
                advantages=advantages[rows],
                response_mask=mask[rows],
                rollout_log_probs=None if sampled is None else sampled[rows],
                seed=step.seed + index,
                max_length=max_length,
                progress=_progress(step, index),
                **of_rows,
            ),
            group=step.group_ids[rows],
            sequences=tuple(sequences[row] for row in rows.tolist()),
            counts=counts,
            weights=None if weights is None else weights[rows],
            kept=batch.kept_of(rows),
        )


def _progress(step: RolloutFile, index: int) -> float | None:
    if step.num_steps is None:
        return None
    return min((max(step.step - 1, 0) + index / len(step.updates)) / step.num_steps, 1.0)


def _advantages(path: Path, step: RolloutFile, mask: Tensor) -> Tensor:
    """Return the recorded advantages, ``(R, 1)`` or ``(R, T)``, or else each reward minus its prompt's mean reward."""
    if step.advantages is not None:
        return step.advantages[:, None] if len(step.advantages) == len(step) else _spread(step.advantages, mask)
    if step.rewards is None:
        raise UserError(f"step {step.step} in {str(path)!r} has neither advantages nor rewards; record one of them")
    graded = ~step.rewards.isnan()
    advantages = torch.zeros(len(step), 1)
    advantages[graded] = ops.group_centred(step.rewards[graded, None].double(), step.group_ids[graded, None]).float()
    return advantages


def _turn_ids(step: RolloutFile) -> Tensor:
    """Return the turn of each token after the prompt, ``(R, T)``; -1 for tokens that the model did not generate."""
    sizes = step.sequence_lengths - step.prompt_lengths
    behind = torch.arange(max(int(sizes.max()), 1)) < sizes[:, None]
    first = torch.repeat_interleave(step.prompt_lengths, step.sequence_lengths)
    place = torch.arange(len(step.token_ids)) - torch.repeat_interleave(
        step.sequence_lengths.cumsum(0) - step.sequence_lengths, step.sequence_lengths
    )
    mask = torch.zeros(behind.shape, dtype=torch.bool).masked_scatter(behind, step.response_mask[place >= first])
    if step.turn_ids is not None:
        return torch.full(mask.shape, -1).masked_scatter(mask, step.turn_ids)
    return turns(mask)


def _spread(flat: Tensor, mask: Tensor) -> Tensor:
    """Scatter ``(N,)`` values of response tokens, stored row by row, into ``(R, T)``, with 0 elsewhere."""
    return torch.zeros(mask.shape, dtype=flat.dtype).masked_scatter(mask, flat)


def _splits_prompts(step: RolloutFile) -> bool:
    """Whether an update contained some but not all of the trained responses to a prompt."""
    groups = torch.unique(step.group_ids, return_inverse=True)[1]
    learned = torch.unique(torch.cat([update.rows for update in step.updates]))
    whole = torch.bincount(groups[learned], minlength=len(step))
    found = [torch.bincount(groups[update.rows], minlength=len(step)) for update in step.updates]
    return any(bool(((count > 0) & (count != whole)).any()) for count in found)
