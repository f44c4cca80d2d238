"""Measures how far clipping rotates the gradient: the cosine between a rule's gradient and the unclipped gradient."""

from __future__ import annotations

import math
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
from rlzoo.core.policy import ClipPolicy
from rlzoo.core.types import ClipInputs
from rlzoo.journal.rollout_file import readable
from rlzoo.lab.recorded import RecordedRun, RecordedUpdate
from rlzoo.learner.judge import judgement
from rlzoo.learner.log_probs import ResponseLogProbs
from rlzoo.learner.micro_batches import padded
from rlzoo.measure.comparison import t_interval
from rlzoo.measure.intervals import Interval
from rlzoo.models.pretrained import load_named

SAME = 0.02  # nats; maximum difference between recorded log-probs and log-probs recomputed from kept weights


@dataclass(frozen=True, slots=True)
class Cosine:
    """The cosine for one rule, averaged over the updates whose weights were kept."""

    mean: float
    # 95%, Student's t over rollout batches, because updates on the same batch share responses; None for fewer than two batches
    interval: Interval | None
    by_length: tuple[float, ...]  # for the responses of each length bin; NaN for an empty bin
    num_updates: int


def cosines(
    run: RecordedRun,
    states: Mapping[str, Sequence[ClipPolicy]],
    edges: Sequence[float],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Cosine]:
    """Measure the cosine for every rule on the updates whose weights were kept.

    The reference is the gradient of ``mean over responses of exp(S) A``, where S is the summed log-ratio. Unclipped importance
    sampling follows this gradient for the recorded advantages (the theorem in arXiv 2509.09177 bounds the angle to it). A
    rule's own length weighting, such as a mean over tokens, also rotates its gradient, even at ratio 1. If the run used a
    mismatch correction, the correction also applies to the reference and to every rule whose ratio is not relative to the
    sampler.

    Args:
        run: a run that kept weights; see `has_weights`.
        states: each rule before every update, by label; see `rlzoo.lab.replay.Replayed`.
        edges: ``(K + 1,)`` edges of the length bins, in tokens.
        progress: called after each update with the number of finished updates and the total number.

    Raises:
        UserError: the weights do not match the recorded log-probs.
    """
    assert run.config is not None, "only a run directory keeps weights"
    model, _ = load_named(run.config.model)
    module = ResponseLogProbs(model, run.config.rollout.temperature)
    is_bfloat16 = run.config.learner.autocast == "bfloat16"
    rows: dict[str, list[tuple[int, float, list[float]]]] = {label: [] for label in states}
    kept = [(place, update) for place, update in enumerate(run.updates) if _weights_file(run, update).is_file()]
    for done, (place, update) in enumerate(kept, start=1):
        with readable(_weights_file(run, update)):
            load_model(model, _weights_file(run, update))
        gradients = {"": unclipped(update.inputs) if update.weights is None else unclipped(update.inputs) * update.weights}
        for label, policies in states.items():
            scale = (update.counts, run.max_length, update.weights_for(policies[place]))
            gradients[label] = judgement(policies[place], update.inputs, *scale).gradient
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bfloat16):
            by_bin = _model_gradients(module, update, gradients, torch.tensor(edges))
        reference = by_bin.pop("")
        for label, gradient in by_bin.items():
            bins = [cosine(first, second) for first, second in zip(gradient, reference, strict=True)]
            rows[label].append((update.step, cosine(gradient.sum(0), reference.sum(0)), bins))
        progress(done, len(kept))
    return {label: _summary(rows_of_rule) for label, rows_of_rule in rows.items()}


def has_weights(run: RecordedRun) -> bool:
    """Whether the run kept the weights of any update (``checkpoint.keep_for_replay``)."""
    return run.config is not None and any(_weights_file(run, update).is_file() for update in run.updates)


def _weights_file(run: RecordedRun, update: RecordedUpdate) -> Path:
    return run.path / "replay" / f"{update.step:06d}-{update.index}.safetensors"


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


def _model_gradients(
    module: ResponseLogProbs, update: RecordedUpdate, gradients: Mapping[str, Tensor], edges: Tensor
) -> dict[str, Tensor]:
    """For each label, return the flat model gradient of ``sum(g * log_probs)`` over each length bin's responses, ``(K, P)``."""
    mask = update.inputs.response_mask
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    sums = {label: torch.zeros(NUM_BINS, sum(parameter.numel() for parameter in parameters)) for label in gradients}
    bins = bin_index(mask.sum(-1), edges)
    for k in set(bins.tolist()):
        in_bin = bins == k
        log_probs, _ = module(padded(update.batch, update.rows[in_bin], pad_id=0))
        chosen = mask[in_bin]
        worst = float((log_probs.detach() - update.inputs.log_probs[in_bin][chosen]).abs().max())
        if not worst < SAME:
            raise UserError(
                f"the weights kept for step {update.step}, update {update.index}, produce log-probs that differ from the "
                f"recorded ones by up to {worst:.3g}; the weights do not belong to this recording"
            )
        for label, gradient in gradients.items():
            by_parameter = torch.autograd.grad(log_probs, parameters, gradient[in_bin][chosen], retain_graph=True)
            sums[label][k] = torch.cat([values.float().flatten() for values in by_parameter])
    return sums


def _summary(rows: Sequence[tuple[int, float, list[float]]]) -> Cosine:
    known = [row for row in rows if not math.isnan(row[1])]
    if not known:
        return Cosine(math.nan, None, (math.nan,) * NUM_BINS, 0)
    steps, values, bins = (np.array(column) for column in zip(*known, strict=True))
    counted = (~np.isnan(bins)).sum(0)
    by_length = np.where(counted > 0, np.nansum(bins, axis=0) / np.maximum(counted, 1), np.nan)
    means = np.array([values[steps == step].mean() for step in np.unique(steps)])
    return Cosine(float(values.mean()), t_interval(means), tuple(by_length.tolist()), len(known))
