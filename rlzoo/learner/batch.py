"""A rollout step as tensors: `Batch`, `AdvantageBatch` (which adds advantages) and `ScoredBatch` (which adds old log-probs)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlzoo.rollout.kept import KeptSets, ranges
from rlzoo.rollout.types import Rollout, RolloutGroup


@dataclass(frozen=True, slots=True)
class Batch:
    """The graded responses of one rollout step as tensors, on the CPU.

    B is the number of responses. Position t of a row is the t-th token after its prompt, and T is the largest number of tokens
    after any prompt. ``response_mask`` is True on tokens that the model chose, and False on the environment's tokens between
    two turns.
    """

    step: int  # rollout step of the run, from 1
    sequences: tuple[Tensor, ...]  # B ragged rows of token IDs, each starting with the prompt
    prompt_lengths: Tensor  # (B,) int64
    response_mask: Tensor  # (B, T) bool, padded on the right
    turn_ids: Tensor  # (B, T) int64: 0, 1, ... on the model's tokens, -1 elsewhere
    rollout_log_probs: Tensor  # (B, T) float32, as the sampler reported them
    rewards: Tensor  # (B,) float32; NaN for a response without a grade
    group_ids: Tensor  # (B,) int64; responses to the same prompt share an ID
    finished: Tensor  # (B,) bool; False if the response was cut off at a limit
    # (B,) float32 each: the named rewards, whose weighted sum is `rewards` before shaping; None without named rewards
    reward_parts: Mapping[str, Tensor] | None = field(default=None, kw_only=True)
    # (B, T) rewards of all turns but the last, each at its turn's last token; included in `rewards`
    turn_rewards: Tensor | None = field(default=None, kw_only=True)
    state_ids: Tensor | None = field(default=None, kw_only=True)  # (B, T) int64: state at the start of the token's turn
    # tokens kept by top-k and top-p, one set per model token, row by row; None for the whole vocabulary
    kept: KeptSets | None = field(default=None, kw_only=True)

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def lengths(self) -> Tensor:
        """Number of tokens that the model chose in each response, ``(B,)``."""
        return self.response_mask.sum(dim=-1)

    @property
    def graded(self) -> Tensor:
        """Whether each response has a grade, ``(B,)``. A response without one has advantage 0 and is not passed to the rule."""
        return ~self.rewards.isnan()

    @property
    def sizes(self) -> list[int]:
        """Number of tokens in each row, including the prompt."""
        return [sequence.numel() for sequence in self.sequences]

    @property
    def token_ids(self) -> Tensor:
        """The IDs of the tokens that the model chose, ``(B, T)``, with 0 elsewhere."""
        pairs = zip(self.sequences, self.prompt_lengths.tolist(), strict=True)
        return pad_sequence([sequence[start:] for sequence, start in pairs], batch_first=True) * self.response_mask

    def kept_of(self, rows: Tensor) -> KeptSets | None:
        """Return the sets of kept tokens for the model's tokens in the given rows, row by row, or None without truncation."""
        if self.kept is None:
            return None
        lengths = self.lengths
        return self.kept.select(ranges((lengths.cumsum(0) - lengths)[rows], lengths[rows]))

    def scatter(self, rows: Tensor, values: Tensor) -> Tensor:
        """Scatter one value per model token to ``(R, T)``, with 0 elsewhere. The operation is differentiable.

        T is the width of the whole batch, so a rule's inputs do not depend on the split into micro-batches.

        Args:
            rows: ``(R,)``.
            values: ``(N,)``, row by row.
        """
        mask = self.response_mask[rows].to(values.device)
        return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)


@dataclass(frozen=True, slots=True)
class AdvantageBatch(Batch):
    """A batch with advantages, before its first optimizer step.

    The current model is still the one that defines the old log-probs, so the training pass of the first minibatch also
    yields the old log-probs of that minibatch.
    """

    advantages: Tensor  # (B, 1), or (B, T) with per-token credit
    seed: int  # seed of the step, which determines the split into minibatches
    ref_log_probs: Tensor | None = field(default=None, kw_only=True)  # (B, T); None without a reference model
    values: Tensor | None = field(default=None, kw_only=True)  # (B, T) from the critic; None without one
    last_values: Tensor | None = field(default=None, kw_only=True)  # (B, 1) from the critic after the last token
    value_targets: Tensor | None = field(default=None, kw_only=True)  # (B, T) targets that the critic learns
    # (B, 1) or (B, T) factors of the objective, from a mismatch correction; None without a correction
    correction_weights: Tensor | None = field(default=None, kw_only=True)

    @classmethod
    def of(cls, batch: Batch, **scores: Any) -> Self:
        """Add scores to a batch."""
        known = {column.name: getattr(batch, column.name) for column in fields(cls) if hasattr(batch, column.name)}
        return cls(**known | scores)

    def reference(self, rows: Tensor, device: torch.device) -> Tensor:
        """Return the reference log-probs ``(R, T)`` of the given rows."""
        assert self.ref_log_probs is not None, "the learner keeps a reference model if the loss has a KL term"
        return self.ref_log_probs[rows].to(device)

    def weights_of(self, rows: Tensor) -> Tensor | None:
        """Return the factors that the correction applies to the objective of the given rows, or None without a correction."""
        return None if self.correction_weights is None else self.correction_weights[rows]


@dataclass(frozen=True, slots=True)
class ScoredBatch(AdvantageBatch):
    """A batch with all of a rule's inputs except the current model's log-probs."""

    old_log_probs: Tensor  # (B, T) float32, from the model before the batch's first optimizer step
    old_entropy: Tensor | None = field(default=None, kw_only=True)  # (B, T) in nats, from the same model; None if not needed


def collate(groups: Sequence[RolloutGroup], step: int = 0) -> Batch:
    """Convert graded responses to tensors.

    Args:
        groups: the responses with their rewards.
        step: rollout step of the run.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    size = max(len(rollout.response_ids) for rollout in rollouts)
    turn_ids = torch.full((len(rollouts), size), -1)
    reported, paid, states = torch.zeros(turn_ids.shape), torch.zeros(turn_ids.shape), torch.zeros_like(turn_ids)
    for row, rollout in enumerate(rollouts):
        for number, (start, end) in enumerate(rollout.spans):
            turn_ids[row, start:end] = number
            reported[row, start:end] = torch.tensor(rollout.rollout_log_probs[start:end])
        for turn in rollout.turns:
            states[row, turn.start : turn.end] = turn.state
        for turn in rollout.turns[:-1] if not rollout.failure else ():
            paid[row, turn.end - 1] = turn.reward or 0.0
    played = any(turn.reward is not None for rollout in rollouts for turn in rollout.turns)
    names = sorted({name for rollout in rollouts for name in rollout.reward_parts})
    parts = {name: torch.tensor([rollout.reward_parts.get(name, torch.nan) for rollout in rollouts]) for name in names}
    return Batch(
        step=step,
        sequences=tuple(torch.tensor(rollout.prompt_ids + rollout.response_ids) for rollout in rollouts),
        prompt_lengths=torch.tensor([len(rollout.prompt_ids) for rollout in rollouts]),
        response_mask=turn_ids >= 0,
        turn_ids=turn_ids,
        rollout_log_probs=reported,
        rewards=torch.tensor(
            [torch.nan if rollout.reward is None else rollout.reward for rollout in rollouts], dtype=torch.float32
        ),
        group_ids=torch.tensor([index for index, group in enumerate(groups) for _ in group.rollouts]),
        finished=torch.tensor([rollout.finished for rollout in rollouts]),
        reward_parts=parts or None,
        turn_rewards=paid if played else None,
        state_ids=states if played else None,
        kept=_kept(rollouts, turn_ids >= 0) if any(rollout.kept is not None for rollout in rollouts) else None,
    )


def _kept(rollouts: Sequence[Rollout], response_mask: Tensor) -> KeptSets:
    """Return the sets of kept tokens for the model's tokens, row by row."""
    collections = []
    for rollout, chosen in zip(rollouts, response_mask, strict=True):
        kept = rollout.kept or KeptSets.of([], [0] * len(rollout.response_ids))
        # the environment's tokens have empty sets
        collections.append(KeptSets(kept.ids, kept.sizes[chosen[: len(kept)]]))
    return KeptSets.join(collections)
