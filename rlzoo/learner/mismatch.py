"""Corrects for a sampler whose probabilities are not the trainer's; apart from the clip policy, and measured apart."""

from __future__ import annotations

import torch
from torch import Tensor

from rlzoo import ops
from rlzoo.config.sections import MismatchConfig
from rlzoo.fairness import NUM_BINS, bin_edges, bin_index
from rlzoo.learner.batch import ScoredBatch


def mismatch_weights(log_ratio: Tensor, response_mask: Tensor, settings: MismatchConfig) -> Tensor | None:
    """What to multiply the objective with, given the log-ratio of trainer and sampler before the first update.

    | correction | weight, with rho the ratio exp(log pi_old - log pi_rollout), pooled as ``pool`` says |
    |---|---|
    | tis | min(rho, high): truncated importance sampling |
    | mis | rho where rho <= high, else 0: masked importance sampling |
    | icepop | rho where low <= rho <= high, else 0 (arXiv 2510.18855) |
    | length_fair | 1 where the summed log-ratio of the response is within width * sqrt(L), else 0 |

    ``length_fair`` is ours: a sum spreads with the square root of the length, so bounds that do not grow with it drop long
    responses before short ones, and those that do drop every length alike.

    Args:
        log_ratio: ``(B, T)`` log pi_old - log pi_rollout per token.
        response_mask: ``(B, T)`` bool.
        settings: which correction, of whose ratio.

    Returns:
        float32 ``(B, 1)``, or ``(B, T)`` where the ratio is each token's; None for no correction.

    Example:
        >>> two_tokens = torch.tensor([[0.1, 0.2]])
        >>> whole = MismatchConfig(correction="tis", pool="sum", high=1.2)
        >>> mismatch_weights(two_tokens, torch.ones(1, 2, dtype=torch.bool), whole)  # min(exp(0.3), 1.2)
        tensor([[1.2000]])
    """
    if settings.correction == "none":
        return None
    total = ops.sequence_sum(log_ratio, response_mask)
    if settings.correction == "length_fair":
        return (total.abs() <= settings.width * ops.lengths(response_mask).sqrt()).float()
    pools = {"token": torch.where(response_mask, log_ratio, 0.0), "sum": total, "mean": total / ops.lengths(response_mask)}
    ratio = ops.limited_exp(pools[settings.pool])
    if settings.correction == "tis":
        return ratio.clamp(max=settings.high)
    low = settings.low if settings.correction == "icepop" else 0.0
    return torch.where((ratio >= low) & (ratio <= settings.high), ratio, torch.zeros_like(ratio))


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
