"""The table of measurements used to compare all policies, with one row per response and optimizer step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from rlzoo.core import ops
from rlzoo.core.fairness import NUM_BINS
from rlzoo.core.policy import ClipStats
from rlzoo.core.types import ClipInputs, ClipResult


@dataclass(frozen=True, slots=True)
class ResponseTable:
    """One row per response and optimizer step. Columns are float32 ``(n,)`` on the CPU, except `group` and the turn columns.

    A clip decision is the share of clipped tokens for a token rule, and 0 or 1 for a sequence rule.
    """

    length: Tensor
    advantage: Tensor  # summed over the tokens if each token has its own advantage
    signal: Tensor  # 1 if any token's advantage is not 0
    clipped: Tensor
    clipped_high: Tensor  # above the band with A > 0
    clipped_low: Tensor  # below the band with A < 0
    clipped_dual: Tensor  # above the dual-clip ceiling with A < 0
    limited: Tensor  # not clipped, but with a log-ratio beyond `ops.LOG_RATIO_LIMIT`
    weight: Tensor  # gradient as a multiple of the gradient at ratio 1; 0 if cut off, negative if reversed
    gradient_mass: Tensor  # sum over tokens of |dJ/dlog_probs|
    log_ratio: Tensor  # log-ratio that the rule judged; for a token rule, its mean over the response
    band_low: Tensor  # edges of the rule's band; NaN for a rule without a band
    band_high: Tensor
    band_ceiling: Tensor  # ceiling of the rule's dual clip, which applies where A < 0; NaN without a dual clip
    token_log_ratio_sum: Tensor
    token_log_ratio_squared: Tensor
    token_log_ratio_min: Tensor
    token_log_ratio_max: Tensor
    entropy_sum: Tensor
    kl_sum: Tensor
    group: Tensor  # int64, key of the prompt from `group_keys`, the same in all epochs and minibatches
    turns: Tensor  # number of the model's turns; 1 outside episodes
    turn_tokens: Tensor  # (n, NUM_BINS) tokens of each turn; the last column pools all later turns
    turn_clipped: Tensor  # (n, NUM_BINS) sum of the clip decisions for these tokens

    @property
    def clips_parts(self) -> bool:
        """Whether the rule clips tokens or turns, so that only part of a response may be clipped."""
        return bool(((self.clipped > 0) & (self.clipped < 1)).any())

    @classmethod
    def concat(cls, tables: Sequence[ResponseTable]) -> ResponseTable:
        """Concatenate tables of one run. For different runs, use `pooled_runs`."""
        return cls(*(torch.cat([getattr(table, field.name) for table in tables]) for field in fields(cls)))

    @classmethod
    @torch.no_grad()
    def measure(
        cls,
        inputs: ClipInputs,
        result: ClipResult,
        gradient: Tensor,
        on_policy_gradient: Tensor,
        *,
        group: Tensor,
        entropy: Tensor | None = None,
        kl: Tensor | None = None,
        turn_ids: Tensor | None = None,
    ) -> ResponseTable:
        """Measure one micro-batch.

        Args:
            inputs: inputs to the policy. Per-token advantages are summed.
            result: result of the policy.
            gradient: ``(B, T)`` g = dJ/dlog_probs of the policy's objective alone.
            on_policy_gradient: ``(B, T)`` the same gradient at ``log_probs = old_log_probs``.
            group: ``(B,)`` int64, key of each response's prompt from `group_keys`.
            entropy: ``(B, T)`` in nats; None means 0.
            kl: ``(B, T)`` in nats; None means 0.
            turn_ids: ``(B, T)`` int64; None means that each response is one turn.
        """
        mask, advantages = inputs.response_mask, inputs.advantages
        if advantages.shape[-1] != 1:
            advantages = advantages.masked_fill(~mask, 0.0)
        clipped, log_ratio = result.clipped, result.log_ratio

        def share(values: Tensor) -> Tensor:
            return ops.per_response(values.float(), mask)

        token = ops.log_ratio(inputs)
        none, unknown = torch.zeros_like(advantages[:, :1]), log_ratio.new_tensor(torch.nan)
        band = result.band
        edges = (
            (unknown, unknown, unknown)
            if band is None
            else (band.low, band.high, unknown if band.ceiling is None else band.ceiling)
        )
        columns = (
            mask.sum(-1, keepdim=True).float(),
            advantages.sum(-1, keepdim=True),
            (advantages != 0).any(-1, keepdim=True),
            share(clipped),
            *map(share, _by_edge(result, advantages)),
            share(~clipped & (log_ratio.abs() > ops.LOG_RATIO_LIMIT)),
            _multiple(gradient, on_policy_gradient),
            gradient.abs().sum(-1, keepdim=True),
            share(log_ratio),
            *(share(edge.expand_as(log_ratio)) for edge in edges),
            ops.sequence_sum(token, mask),
            ops.sequence_sum(token.square(), mask),
            token.masked_fill(~mask, torch.inf).amin(-1, keepdim=True),
            token.masked_fill(~mask, -torch.inf).amax(-1, keepdim=True),
            none if entropy is None else ops.sequence_sum(entropy, mask),
            none if kl is None else ops.sequence_sum(kl, mask),
        )
        turn = torch.zeros_like(mask, dtype=torch.long) if turn_ids is None else turn_ids.to(mask.device)
        turns = 1 + turn.masked_fill(~mask, 0).amax(-1)
        turn = turn.clamp(0, NUM_BINS - 1)
        nothing = torch.zeros(len(mask), NUM_BINS, device=mask.device)
        decided = torch.where(mask, clipped.float(), 0.0)
        by_turn = (nothing.scatter_add(1, turn, values) for values in (mask.float(), decided))
        flat = (column.squeeze(-1).float().cpu() for column in columns)
        tensors: list[Tensor] = [*flat, group.long().cpu(), turns.float().cpu(), *(values.cpu() for values in by_turn)]
        return cls(*tensors)

    def where(self, keep: Tensor) -> ResponseTable:
        """Return the rows where ``keep``, bool ``(n,)``, is True."""
        return ResponseTable(*(getattr(self, field.name)[keep] for field in fields(self)))

    def judged(self) -> ResponseTable:
        """Return the rows with tokens and a nonzero advantage, on which clip fractions are computed."""
        return self.where((self.signal > 0) & (self.length > 0))

    def clip_stats(self, edges: Tensor, progress: float = 0.0) -> ClipStats:
        """Sum the rows by length bin and sign of the advantage, for adaptive policies."""
        rows = self.judged()
        return ClipStats.of(edges, rows.length, rows.advantage, rows.clipped, rows.log_ratio, progress=progress)


def group_keys(step: int, group_ids: Tensor) -> Tensor:
    """Return int64 keys of the prompts, unique within a run, for the groups ``(B,)`` of one rollout step.

    Example:
        >>> group_keys(1, torch.tensor([0, 0, 1])).unique().numel()
        2
    """
    return step * 2**32 + group_ids.long()


def pooled_runs(tables: Iterable[ResponseTable]) -> ResponseTable:
    """Concatenate the tables of several runs, giving prompts of different runs different keys."""
    numbered, start = [], 0
    for table in tables:
        names, index = torch.unique(table.group, return_inverse=True)
        numbered.append(replace(table, group=index + start))
        start += len(names)
    return ResponseTable.concat(numbered)


def _by_edge(result: ClipResult, advantages: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split clip decisions into those above the band (A > 0), below it (A < 0) and above the dual-clip ceiling (A < 0)."""
    clipped, band = result.clipped, result.band
    below = clipped & (advantages < 0)
    dual = below & (result.log_ratio > band.ceiling) if band is not None and band.ceiling is not None else below & False
    return clipped & (advantages > 0), below & ~dual, dual


def _multiple(gradient: Tensor, on_policy_gradient: Tensor) -> Tensor:
    """Return the factor, ``(B, 1)``, that brings ``on_policy_gradient`` closest to ``gradient``, or 0 for a zero gradient."""
    # the values are of order 1 / tokens, and their squares would lose digits in float32
    gradient, on_policy_gradient = gradient.double(), on_policy_gradient.double()
    square = on_policy_gradient.square().sum(-1, keepdim=True)
    along = (gradient * on_policy_gradient).sum(-1, keepdim=True)
    return torch.where(square > 0, along / square, 0.0)
