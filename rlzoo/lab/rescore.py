"""Computes the log-probs of recorded tokens under any checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from rlzoo.config.sections import LaunchConfig, LearnerConfig, ModelConfig
from rlzoo.core.errors import UserError
from rlzoo.core.ops import LOG_RATIO_LIMIT
from rlzoo.core.settings import user_path
from rlzoo.journal.manifest import check_model
from rlzoo.journal.recorded import batch_of, rollout_files
from rlzoo.journal.rollout_file import RolloutFile, UpdateLogProbs
from rlzoo.lab.study import Progress
from rlzoo.learner.log_probs import ResponseLogProbs
from rlzoo.learner.micro_batches import MicroBatches
from rlzoo.models.pretrained import load_named
from rlzoo.models.processes import make_accelerator

FARTHEST = 3.0
"""Largest mean difference, in nats per token, between recorded log-probs and those under a checkpoint of the same model."""
SAMPLER = "sampler"
"""Selects the log-probs that the sampler reported, in place of a checkpoint."""


Scores = tuple[Tensor, Tensor]
"""One checkpoint's log-probs and entropies of the model-generated tokens of one step, ``(M,)`` each."""


def rescore(
    paths: Sequence[Path],
    output: Path,
    models: Sequence[str] = (),
    *,
    old: str | None = None,
    ref: str | None = None,
    progress: Progress = lambda activity, done, total: None,
) -> list[Path]:
    """Write copies of rollout files with log-probs computed under other checkpoints.

    Args:
        paths: rollout files and folders with rollout files.
        output: new or empty folder for the new files, which keep the names of the originals.
        models: checkpoints to use, in this order, in place of the recorded updates. The log-probs under each checkpoint
            become one update on all responses. If there are no checkpoints, the recorded updates are kept.
        old: checkpoint for ``old_log_probs`` and ``old_entropy``, or `SAMPLER`; None keeps the recorded values.
        ref: checkpoint for ``ref_log_probs``; None keeps the recorded values.
        progress: called to report progress.

    Returns:
        The paths of the new files.

    Raises:
        UserError: a file cannot be rescored, a checkpoint cannot be loaded or has another vocabulary, or ``output`` is not
            empty.
    """
    files, output = rollout_files(paths), user_path(output)
    steps = {file: RolloutFile.load(file) for file in files}
    _check(steps, output, models, old, ref)
    checkpoints = dict.fromkeys(name for name in (old, *models, ref) if name and name != SAMPLER)
    scores = {name: _scores(name, steps, progress) for name in checkpoints}
    output.mkdir(parents=True, exist_ok=True)
    for file, step in steps.items():
        _rescored(step, {name: scores[name][file] for name in scores}, models, old, ref).save(output / file.name)
    return [output / file.name for file in files]


def _check(steps: Mapping[Path, RolloutFile], output: Path, models: Sequence[str], old: str | None, ref: str | None) -> None:
    """Reject invalid arguments before any model is loaded."""
    if not (models or old or ref):
        raise UserError("nothing to compute: specify checkpoints with --model, --old or --ref")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output {str(output)!r} exists and is not an empty folder; choose another")
    if len({file.name for file in steps}) < len(steps):
        raise UserError("two files have the same name, and their copies would overwrite each other; rescore them separately")
    for file, step in steps.items():
        if old == SAMPLER and step.rollout_log_probs is None:
            raise UserError(f"{str(file)!r} has no rollout_log_probs: --old {SAMPLER} needs them; specify a checkpoint instead")
        if models and old is None and step.old_log_probs is None:
            raise UserError(
                f"{str(file)!r} has no old_log_probs, the denominator of the ratio: use --old with the checkpoint that "
                f"sampled the batch, or --old {SAMPLER} to use the log-probs that the sampler reported"
            )


def _scores(name: str, steps: Mapping[Path, RolloutFile], progress: Progress) -> dict[Path, Scores]:
    """Return one checkpoint's scores for the tokens of every step, computed in float32, just as in the learner."""
    check_model(name)
    model, _ = load_named(ModelConfig.model_validate({"path": name, "dtype": "float32"}))
    accelerator, learner = make_accelerator(LaunchConfig(), LearnerConfig()), LearnerConfig()
    model.to(accelerator.device)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    scores = {}
    for number, (file, step) in enumerate(steps.items()):
        progress(name, number, len(steps))
        largest = max(int(ids.max()) for ids in (step.token_ids, step.kept_ids) if ids is not None and len(ids))
        if largest >= vocabulary:
            raise UserError(
                f"{str(file)!r} contains token id {largest}, but {name!r} has a vocabulary of {vocabulary} tokens; "
                "pass a checkpoint of the model that generated the rollouts"
            )
        batch, module = batch_of(step), ResponseLogProbs(model, step.temperature)
        micro_batches = MicroBatches(accelerator, model, learner, pad_id=0)
        rows = (batch.lengths > 0).nonzero()[:, 0]
        log_probs, entropy = micro_batches.log_probs(module, batch, micro_batches.of(batch, rows))
        scores[file] = log_probs[batch.response_mask], entropy[batch.response_mask]
        recorded = step.old_log_probs if step.old_log_probs is not None else step.rollout_log_probs
        if recorded is None or not len(recorded):
            continue
        apart = float((scores[file][0] - recorded).abs().clamp(max=LOG_RATIO_LIMIT).mean())
        if apart > FARTHEST:
            raise UserError(
                f"under {name!r}, the log-probs of the tokens in {str(file)!r} differ from the recorded ones by {apart:.1f} "
                "nats on average; pass a checkpoint of the model that generated the rollouts, with the same tokenizer"
            )
    progress(name, len(steps), len(steps))
    return scores


def _rescored(
    step: RolloutFile, scores: Mapping[str, Scores], models: Sequence[str], old: str | None, ref: str | None
) -> RolloutFile:
    writer = step.writer if step.writer.startswith("rescored") else f"rescored, of {step.writer or 'unknown'}"
    changes: dict[str, Any] = {"writer": writer}
    if models:
        rows = (step.lengths > 0).nonzero()[:, 0]
        changes["updates"] = tuple(UpdateLogProbs(rows, scores[name][0]) for name in models)
        changes["model"] = ", ".join(models)
    if old == SAMPLER:
        changes |= {"old_log_probs": step.rollout_log_probs, "old_entropy": None}
    elif old is not None:
        changes["old_log_probs"], changes["old_entropy"] = scores[old]
    if ref is not None:
        changes["ref_log_probs"] = scores[ref][0]
    return replace(step, **changes)
