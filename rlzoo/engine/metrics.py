"""What every policy is measured by, the same way: a row per response and update, then a summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from rlzoo import ops
from rlzoo.fairness import NUM_BINS, bin_index, clip_by_length, effective_sample_size
from rlzoo.policy import ClipStats
from rlzoo.types import ClipInputs, ClipResult, RolloutGroup


@dataclass(frozen=True, slots=True)
class ResponseTable:
    """One row per response and optimizer step; every column is float32 ``(n,)`` on the CPU.

    A column of clip decisions holds the share of the response's tokens for a token rule, 0 or 1 for a sequence rule.

    Example:
        ``ResponseTable.concat([first, second]).clipped.mean()``
    """

    length: Tensor
    advantage: Tensor  # summed over the tokens, where they differ by token
    signal: Tensor  # 1 where any token's advantage is not 0
    clipped: Tensor
    clipped_high: Tensor  # above the band with A > 0
    clipped_low: Tensor  # below the band with A < 0
    clipped_dual: Tensor  # above the dual-clip ceiling with A < 0
    limited: Tensor  # not clipped, but beyond the log-ratio that is exponentiated
    weight: Tensor  # mean over tokens of the ratio where the gradient flows, 0 where it is cut
    log_ratio: Tensor  # what the policy judged; for a token rule its mean over the response
    band_low: Tensor  # edges of the band on it; NaN for a rule without one
    band_high: Tensor
    token_log_ratio_sum: Tensor
    token_log_ratio_squared: Tensor
    token_log_ratio_min: Tensor
    token_log_ratio_max: Tensor
    entropy_sum: Tensor
    kl_sum: Tensor

    @classmethod
    def concat(cls, tables: Sequence[ResponseTable]) -> ResponseTable:
        """All rows of several tables."""
        return cls(*(torch.cat([getattr(table, field.name) for table in tables]) for field in fields(cls)))

    @classmethod
    @torch.no_grad()
    def measure(cls, inputs: ClipInputs, result: ClipResult, entropy: Tensor, kl: Tensor | None) -> ResponseTable:
        """Rows for one micro-batch; ``entropy`` and ``kl`` are ``(B, T)``. Advantages per token count by their sum."""
        mask = inputs.response_mask

        def share(values: Tensor) -> Tensor:
            return values.float() if values.shape[-1] == 1 else ops.sequence_mean(values.float(), mask)

        advantages = inputs.advantages
        if advantages.shape[-1] != 1:
            advantages = advantages.masked_fill(~mask, 0.0)
        clipped, log_ratio, band = result.clipped, result.log_ratio, result.band
        high = clipped & (advantages > 0)
        dual = clipped & (advantages < 0)
        dual = dual & (log_ratio > band.ceiling) if band is not None and band.ceiling is not None else dual & False
        low = clipped & (advantages < 0) & ~dual
        limited = ~clipped & (log_ratio.abs() > ops.LOG_RATIO_LIMIT)
        ratio = ops.limited_exp(log_ratio)
        edges = [] if band is None else [band.low, band.high]
        token = ops.log_ratio(inputs)
        columns = (
            mask.sum(-1, keepdim=True).float(),
            advantages.sum(-1, keepdim=True),
            (advantages != 0).any(-1, keepdim=True),
            share(clipped),
            share(high),
            share(low),
            share(dual),
            share(limited),
            share(torch.where(clipped | limited, 0.0, ratio)),
            share(log_ratio),
            *(share(edge.expand_as(log_ratio)) for edge in edges or [log_ratio.new_tensor(torch.nan)] * 2),
            ops.sequence_sum(token, mask),
            ops.sequence_sum(token.square(), mask),
            token.masked_fill(~mask, torch.inf).amin(-1, keepdim=True),
            token.masked_fill(~mask, -torch.inf).amax(-1, keepdim=True),
            ops.sequence_sum(entropy, mask),
            ops.sequence_sum(kl, mask) if kl is not None else torch.zeros_like(advantages[:, :1]),
        )
        return cls(*(column.squeeze(-1).float().cpu() for column in columns))

    def judged(self) -> ResponseTable:
        """The rows with a non-zero advantage: those a clip can act on, and those every clip fraction counts."""
        keep = self.signal > 0
        return ResponseTable(*(getattr(self, field.name)[keep] for field in fields(self)))

    def clip_stats(self, edges: Tensor) -> ClipStats:
        """Sums per length bin and sign of the advantage, for adaptive policies."""
        rows = self.judged()
        return ClipStats.of(edges, rows.length, rows.advantage, rows.clipped, rows.log_ratio)


def clip_metrics(table: ResponseTable, with_kl: bool, with_band: bool = False) -> dict[str, float]:
    """Clip, fairness and ratio metrics of the updates of one step, by their MLflow names; the band where it moves."""
    num_tokens = float(table.length.sum())
    mean = float(table.token_log_ratio_sum.sum()) / num_tokens
    metrics = {
        "ratio/mu_token": mean,
        "ratio/sigma_token": max(0.0, float(table.token_log_ratio_squared.sum()) / num_tokens - mean**2) ** 0.5,
        "ratio/log_ratio_min": float(table.token_log_ratio_min.min()),
        "ratio/log_ratio_max": float(table.token_log_ratio_max.max()),
        "learner/entropy": float(table.entropy_sum.sum()) / num_tokens,
    }
    if with_kl:
        metrics["learner/kl_ref"] = float(table.kl_sum.sum()) / num_tokens
    rows = table.judged()
    if len(rows.length) == 0:
        return metrics
    metrics |= {
        "clip/fraction": float(rows.clipped.mean()),
        "clip/fraction_low": float(rows.clipped_low.mean()),
        "clip/fraction_high": float(rows.clipped_high.mean()),
        "clip/fraction_dual": float(rows.clipped_dual.mean()),
        "clip/fraction_limited": float(rows.limited.mean()),
        "fairness/ess": effective_sample_size(rows.weight),
    }
    by_length = clip_by_length(rows.length, rows.clipped)
    index = bin_index(rows.length, by_length.edges)
    for k in range(NUM_BINS):
        metrics[f"clip/length_bin_{k}_edge"] = float(by_length.edges[k + 1])
        if by_length.count[k] > 0:
            metrics[f"clip/fraction_length_bin_{k}"] = float(by_length.fraction[k])
            metrics[f"fairness/ess_length_bin_{k}"] = effective_sample_size(rows.weight[index == k])
            if with_band and not bool(rows.band_low.isnan().any()):
                metrics[f"clip/band_low_length_bin_{k}"] = float(rows.band_low[index == k].mean())
                metrics[f"clip/band_high_length_bin_{k}"] = float(rows.band_high[index == k].mean())
    if by_length.lre_max is not None and by_length.lre_mean is not None:
        metrics |= {"fairness/lre_max": by_length.lre_max, "fairness/lre_mean": by_length.lre_mean}
    return metrics


def rollout_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Reward and response metrics of one rollout batch, by their MLflow names."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64)
    lengths = torch.tensor([len(rollout.response_ids) for rollout in rollouts], dtype=torch.float64)
    same = [not group.is_mixed for group in groups]
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(correction=0)),
        "reward/zero_std_groups": sum(same) / len(same),
        "response/length_mean": float(lengths.mean()),
        "response/length_p05": float(lengths.quantile(0.05)),
        "response/length_p95": float(lengths.quantile(0.95)),
        "response/truncated": sum(not rollout.finished for rollout in rollouts) / len(rollouts),
    }
