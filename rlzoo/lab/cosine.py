"""Measures how far clipping rotates the gradient: the cosine between a rule's gradient and the unclipped gradient."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_model
from torch import Tensor

from rlzoo.core import ops
from rlzoo.core.errors import UserError
from rlzoo.core.fairness import NUM_BINS, bin_index
from rlzoo.core.types import ClipInputs
from rlzoo.journal.rollout_file import readable
from rlzoo.lab.recorded import RecordedRun, RecordedUpdate
from rlzoo.lab.replay import Replayed
from rlzoo.learner.batch import Batch
from rlzoo.learner.judge import judgement
from rlzoo.learner.log_probs import ResponseLogProbs
from rlzoo.learner.micro_batches import padded
from rlzoo.measure.intervals import Interval, bootstrap
from rlzoo.models.pretrained import load_named

SAME = 0.02  # nats; maximum difference between recorded log-probs and log-probs recomputed from kept weights

_KEPT = re.compile(r"([0-9]{1,9})-([0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class Cosine:
    """The cosine for one rule, averaged over the updates whose weights were kept."""

    mean: float
    # 95%, bootstrapped over rollout batches, because updates on the same batch share responses; None for fewer than two batches
    interval: Interval | None
    by_length: tuple[float, ...]  # for the responses of each length bin; NaN for an empty bin
    num_updates: int


def cosines(
    run: RecordedRun,
    replayed: Mapping[str, Replayed],
    edges: Sequence[float],
    told: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Cosine]:
    """Measure the cosine for every rule on the updates whose weights were kept.

    The reference is the gradient of ``mean over responses of exp(S) A``, where S is the summed log-ratio. Unclipped importance
    sampling follows this gradient for the recorded advantages (the theorem in arXiv 2509.09177 bounds the angle to it). A
    rule's own length weighting, such as a mean over tokens, also rotates its gradient, even at ratio 1. If the run used a
    mismatch correction, the correction also applies to the reference and to every rule whose ratio is not relative to the
    sampler.

    Args:
        run: a run that kept weights; see `has_weights`.
        replayed: replayed rules by label.
        edges: ``(K + 1,)`` edges of the length bins, in tokens.
        told: called after each update with the number of finished updates and the total number.

    Raises:
        UserError: the weights do not match the recorded log-probs.
    """
    files = _kept(run)
    assert run.config is not None, "only a run directory keeps weights"
    model, _ = load_named(run.config.model)
    module = ResponseLogProbs(model, run.config.rollout.temperature)
    is_bfloat16 = run.config.learner.autocast == "bfloat16"
    found: dict[str, list[tuple[int, float, list[float]]]] = {label: [] for label in replayed}
    kept = [(position, update) for position, update in enumerate(run.updates) if (update.step, update.index) in files]
    for done, (position, update) in enumerate(kept, start=1):
        with readable(files[update.step, update.index]):
            load_model(model, files[update.step, update.index])
        given = (update.inputs, update.counts, run.max_length)
        states = {label: rule.states[position] for label, rule in replayed.items()}
        wanted = {label: judgement(state, *given, update.weights_for(state)).gradient for label, state in states.items()}
        plain = unclipped(update.inputs) if update.weights is None else unclipped(update.inputs) * update.weights
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bfloat16):
            totals = _gradients(module, update, {"": plain, **wanted}, torch.tensor(edges))
        reference = totals.pop("")
        for label, parts in totals.items():
            bins = [cosine(part, other) for part, other in zip(parts, reference, strict=True)]
            found[label].append((update.step, cosine(parts.sum(0), reference.sum(0)), bins))
        told(done, len(kept))
    return {label: _summary(rows) for label, rows in found.items()}


def has_weights(run: RecordedRun) -> bool:
    """Whether the run kept the weights of any update (``checkpoint.keep_for_replay``)."""
    return run.config is not None and bool(_kept(run))


def unclipped(inputs: ClipInputs) -> Tensor:
    """Return the gradient with respect to the log-probs, ``(B, T)``, of the mean of exp(S) A over responses."""
    log_ratio = ops.sequence_sum(ops.log_ratio(inputs), inputs.response_mask)
    number = int(inputs.response_mask.any(-1).sum())
    weight = ops.limited_exp(log_ratio) * inputs.advantages / max(number, 1)
    return torch.where(inputs.response_mask, weight.expand_as(inputs.log_probs), 0.0)


def cosine(first: Tensor, second: Tensor) -> float:
    """Return the cosine of the angle between two flat gradients, or NaN if one is 0."""
    norm = float(first.norm() * second.norm())
    return float(first @ second) / norm if norm > 0 else math.nan


def _gradients(
    module: ResponseLogProbs, update: RecordedUpdate, wanted: Mapping[str, Tensor], edges: Tensor
) -> dict[str, Tensor]:
    """For each label, return the flat model gradient of ``sum(g * log_probs)`` over each length bin's responses, ``(K, P)``."""
    inputs = update.inputs
    sizes = torch.tensor([sequence.numel() for sequence in update.sequences])
    batch = Batch(
        step=update.step,
        sequences=update.sequences,
        prompt_lengths=sizes
        - torch.where(inputs.response_mask, torch.arange(1, inputs.response_mask.shape[1] + 1), 0).amax(-1),
        response_mask=inputs.response_mask,
        turn_ids=torch.where(inputs.response_mask, 0, -1) if inputs.turn_ids is None else inputs.turn_ids,
        rollout_log_probs=inputs.log_probs,
        rewards=inputs.advantages[:, 0],
        group_ids=update.group,
        finished=torch.ones(len(sizes), dtype=torch.bool),
        kept=update.kept,
    )
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    sums = {label: torch.zeros(NUM_BINS, sum(parameter.numel() for parameter in parameters)) for label in wanted}
    bins = bin_index(batch.lengths, edges)
    for k in set(bins.tolist()):
        rows = (bins == k).nonzero()[:, 0]
        log_probs, _ = module(padded(batch, rows, pad_id=0))
        mask = inputs.response_mask[rows]
        worst = float((log_probs.detach() - inputs.log_probs[rows][mask]).abs().max())
        if not worst < SAME:
            raise UserError(
                f"the weights kept for step {update.step}, update {update.index}, produce log-probs that differ from the "
                f"recorded ones by up to {worst:.3g}; the weights do not belong to this recording"
            )
        for label, gradient in wanted.items():
            parts_of = torch.autograd.grad(log_probs, parameters, gradient[rows][mask], retain_graph=True)
            sums[label][k] = torch.cat([part.float().flatten() for part in parts_of])
    return sums


def _kept(run: RecordedRun) -> dict[tuple[int, int], Path]:
    """Return the weight files, keyed by step and update."""
    files = {}
    for file in sorted((run.path / "replay").glob("*.safetensors")):
        name = _KEPT.fullmatch(file.stem)
        if name is None:
            raise UserError(f"{str(file)!r}: expected a name of the form STEP-UPDATE.safetensors; rename or remove the file")
        files[int(name[1]), int(name[2])] = file
    return files


def _summary(rows: Sequence[tuple[int, float, list[float]]]) -> Cosine:
    kept = [row for row in rows if not math.isnan(row[1])]
    if not kept:
        return Cosine(math.nan, None, (math.nan,) * NUM_BINS, 0)
    steps, values, bins = (np.array(column) for column in zip(*kept, strict=True))
    counted = (~np.isnan(bins)).sum(0)
    by_length = np.where(counted > 0, np.nansum(bins, axis=0) / np.maximum(counted, 1), np.nan)
    means = np.array([values[steps == step].mean() for step in np.unique(steps)])
    return Cosine(float(values.mean()), bootstrap([means], np.mean), tuple(by_length.tolist()), len(kept))
