"""Measures the difference between the sampler's and the learner's log-probs in every step."""

from __future__ import annotations

import torch
from torch import Tensor

from rlzoo.config.run_config import RunConfig
from rlzoo.core import ops
from rlzoo.core.errors import RunError
from rlzoo.core.fairness import NUM_BINS, bin_edges, bin_index
from rlzoo.learner.batch import ScoredBatch

EXACT, COARSE = 0.005, 0.25
"""Limits on the mean difference in nats per token, in float32 and in lower precision. Rounding causes 1e-7 in float32, and
0.001 (embedded) to 0.05 (SmolLM2) in bfloat16. A model that handles padding, caches or noise incorrectly causes 0.3 to 7."""


def log_mismatch(batch: ScoredBatch) -> Tensor:
    """Compute ``log pi_old - log pi_rollout`` per token, ``(B, T)``, with 0 where the response mask is False."""
    return torch.where(batch.response_mask, batch.old_log_probs - batch.rollout_log_probs, 0.0)


def refuse_mismatch(config: RunConfig, batch: ScoredBatch) -> None:
    """Raise RunError if, at equal weights, the sampler's log-probs differ from the learner's by more than rounding error."""
    is_exact = config.model.dtype == "float32" and config.learner.autocast == "none" and not config.learner.tf32
    limit = (EXACT if is_exact else COARSE) / min(1.0, config.rollout.temperature)  # the temperature divides the logits
    size = mismatch_metrics(batch)["mismatch/log_ratio_abs_mean"]
    if not size <= limit:
        raise RunError(
            f"step {batch.step}: the sampler's log-probs differ from the learner's by {size:.2g} nats per token although both "
            f"use the same weights (rounding: at most {limit:.2g}); set rollout.engine=generate, learner.packing=false or "
            "learner.gradient_checkpointing=false, or choose another model"
        )


def mismatch_metrics(batch: ScoredBatch) -> dict[str, float]:
    """Compute the sampler-trainer mismatch and the share of tokens that the correction keeps in each length bin."""
    log_ratio, mask = log_mismatch(batch).double(), batch.response_mask
    total = log_ratio.sum(-1)
    metrics = {
        "mismatch/kl": float(-log_ratio[mask].mean()),  # k1 estimate under the sampler, in nats per token
        "mismatch/log_ratio_abs_mean": float(log_ratio[mask].abs().mean()),
        "mismatch/log_ratio_abs_max": float(log_ratio.abs().max()),
        "mismatch/sum_abs_mean": float(total.abs().mean()),
    }
    weights = batch.correction_weights
    if weights is None:
        return metrics
    kept, mean = (ops.per_response(values, mask)[:, 0] for values in ((weights > 0).double(), weights))
    metrics |= {"mismatch/kept": float(kept.mean()), "mismatch/weight_mean": float(mean.double().mean())}
    index = bin_index(batch.lengths, bin_edges(batch.lengths))
    return metrics | {
        f"mismatch/kept_length_bin_{k}": float(kept[index == k].mean()) for k in range(NUM_BINS) if bool((index == k).any())
    }
