"""How far the sampler is from the trainer, and what a correction left of the responses."""

from __future__ import annotations

import torch
from torch import Tensor

from rlzoo import ops
from rlzoo.fairness import NUM_BINS, bin_edges, bin_index
from rlzoo.learner.batch import ScoredBatch


def log_mismatch(batch: ScoredBatch) -> Tensor:
    """Compute trainer against sampler per token, ``log pi_old - log pi_rollout``, ``(B, T)``, 0 where the mask is False."""
    return torch.where(batch.response_mask, batch.old_log_probs - batch.rollout_log_probs, 0.0)


def mismatch_metrics(batch: ScoredBatch) -> dict[str, float]:
    """How far the sampler is from the trainer, and what the correction left of the responses, by length bin."""
    log_ratio, mask = log_mismatch(batch).double(), batch.response_mask
    total = log_ratio.sum(-1)
    metrics = {
        "mismatch/kl": float(-log_ratio[mask].mean()),  # k1 under the sampler, nats per token
        "mismatch/log_ratio_abs_mean": float(log_ratio[mask].abs().mean()),
        "mismatch/log_ratio_abs_max": float(log_ratio.abs().max()),
        "mismatch/sum_abs_mean": float(total.abs().mean()),
    }
    weights = batch.weights
    if weights is None:
        return metrics
    kept = (weights > 0).double()
    kept = kept[:, 0] if kept.shape[-1] == 1 else ops.sequence_mean(kept, mask)[:, 0]
    mean = weights[:, 0] if weights.shape[-1] == 1 else ops.sequence_mean(weights, mask)[:, 0]
    metrics |= {"mismatch/kept": float(kept.mean()), "mismatch/weight_mean": float(mean.double().mean())}
    index = bin_index(batch.lengths, bin_edges(batch.lengths))
    return metrics | {
        f"mismatch/kept_length_bin_{k}": float(kept[index == k].mean()) for k in range(NUM_BINS) if bool((index == k).any())
    }
