"""A graded rollout batch as tensors, and how its rows are cut into batches for the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlzoo.advantages import Advantage, compute_advantages
from rlzoo.engine.shaping import overlong_penalty, without_truncated
from rlzoo.sections import RewardConfig
from rlzoo.types import ClipInputs, RolloutGroup

PaddingSide = Literal["left", "right"]


@dataclass(frozen=True, slots=True)
class ModelBatch:
    """What one forward pass reads: R rows padded to S tokens, or packed end to end in one row of S tokens.

    Example:
        Prompt (5, 6) with response (7, 1), padded on the right to 5: ``input_ids = [[5, 6, 7, 1, 0]]``,
        ``predicts = [[False, True, True, False, False]]``: positions 1 and 2 predict the response.
    """

    input_ids: Tensor  # (R, S)
    attention_mask: Tensor | None  # (R, S) 1 on tokens, 0 on padding; None: what follows a row's end is masked by causality
    position_ids: Tensor | None  # (R, S) from 0 at each row's first token, packed or not; None: every row starts at 0
    predicts: Tensor  # (R, S) bool: positions whose next token belongs to the response

    def to(self, device: torch.device) -> ModelBatch:
        """The same batch on a device."""
        mask, positions = self.attention_mask, self.position_ids
        return ModelBatch(
            self.input_ids.to(device),
            None if mask is None else mask.to(device),
            None if positions is None else positions.to(device),
            self.predicts.to(device),
        )


@dataclass(frozen=True, slots=True)
class Experience:
    """A rollout batch ready to learn from: B responses, at most T tokens long, on the CPU.

    Example:
        ``experience.clip_inputs(rows, log_probs)`` is what a clip policy reads for those rows.
    """

    sequences: tuple[Tensor, ...]  # B rows of prompt and response ids, ragged
    response_mask: Tensor  # (B, T) bool, right-padded
    rollout_log_probs: Tensor  # (B, T) float32, from the sampler
    rewards: Tensor  # (B,) as the estimator of the advantages sees them
    group_ids: Tensor  # (B,) within this batch
    advantages: Tensor  # (B, 1), or (B, T) with 0 on the padding, where a KL is part of the reward
    finished: Tensor | None = None  # (B,) bool, False: cut off at the length limit
    old_log_probs: Tensor | None = None  # (B, T) from the trainer; the learner fills it in
    ref_log_probs: Tensor | None = None  # (B, T) under the reference model, when a KL to it is wanted
    mismatch_weights: Tensor | None = None  # (B, 1) or (B, T) factors of the objective, where the sampler is corrected for
    step: int = 0  # of the run: with a group's number it names a prompt

    @property
    def lengths(self) -> Tensor:
        """Response lengths in tokens, ``(B,)``."""
        return self.response_mask.sum(dim=-1)

    @property
    def sizes(self) -> list[int]:
        """Tokens of each row, prompt and response."""
        return [sequence.numel() for sequence in self.sequences]

    def __len__(self) -> int:
        return len(self.sequences)

    @classmethod
    def from_groups(
        cls, groups: Sequence[RolloutGroup], advantage: Advantage, reward: RewardConfig | None = None, max_length: int = 0
    ) -> Experience:
        """Lay graded rollouts out as tensors and turn their rewards into advantages.

        Args:
            groups: the rollouts, each with the task's reward.
            advantage: the estimator.
            reward: how a reward is shaped before the estimator sees it; None: not at all. Its KL comes in later, see
                `rlzoo.engine.shaping.with_kl_in_the_reward`.
            max_length: length limit of a response, in tokens; read only where there is a penalty on length.
        """
        reward = reward or RewardConfig()
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        group_ids = torch.tensor([index for index, group in enumerate(groups) for _ in group.rollouts])
        lengths = torch.tensor([len(rollout.response_ids) for rollout in rollouts])
        rewards = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float32)
        rewards = rewards - overlong_penalty(lengths, max_length, reward)
        finished = torch.tensor([rollout.finished for rollout in rollouts])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        reported = torch.zeros(mask.shape)
        reported[mask] = torch.tensor([value for rollout in rollouts for value in rollout.rollout_log_probs])
        return cls(
            sequences=tuple(torch.tensor(rollout.prompt_ids + rollout.response_ids) for rollout in rollouts),
            response_mask=mask,
            rollout_log_probs=reported,
            rewards=rewards,
            group_ids=group_ids,
            advantages=without_truncated(compute_advantages(rewards, group_ids, advantage), finished, reward),
            finished=finished,
        )

    def model_batch(self, rows: Tensor, pad_id: int, padding_side: PaddingSide = "right") -> ModelBatch:
        """Pad some rows to the longest of them; on the right, a causal model needs no mask to ignore what follows a row."""
        sequences = [self.sequences[row] for row in rows.tolist()]
        sizes = torch.tensor([sequence.numel() for sequence in sequences])[:, None]
        input_ids = pad_sequence(sequences, batch_first=True, padding_value=pad_id, padding_side=padding_side)
        places = torch.arange(input_ids.shape[1])
        ends = torch.full_like(sizes, input_ids.shape[1]) if padding_side == "left" else sizes
        responses = self.response_mask[rows].sum(dim=-1, keepdim=True)
        predicts = (places >= ends - responses - 1) & (places < ends - 1)
        if padding_side == "right":
            return ModelBatch(input_ids, None, None, predicts)
        attention_mask = (places >= ends - sizes).long()
        position_ids = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
        return ModelBatch(input_ids, attention_mask, position_ids, predicts)

    def packed_batch(self, rows: Tensor) -> ModelBatch:
        """Put some rows end to end in one, without padding."""
        sequences = [self.sequences[row] for row in rows.tolist()]
        predicts = torch.zeros(sum(map(len, sequences)), dtype=torch.bool)
        end = 0
        for sequence, response in zip(sequences, self.lengths[rows].tolist(), strict=True):
            end += len(sequence)
            predicts[end - response - 1 : end - 1] = True
        positions = torch.cat([torch.arange(len(sequence)) for sequence in sequences])
        return ModelBatch(torch.cat(sequences)[None], None, positions[None], predicts[None])

    def scatter(self, rows: Tensor, values: Tensor) -> Tensor:
        """Values of response tokens, ``(N,)`` row by row, laid out as ``(R, T)`` with 0 on the padding; keeps the gradient.

        T is that of the whole batch whichever rows are asked for, so that a rule never sees how they were cut.
        """
        mask = self.response_mask[rows].to(values.device)
        return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)

    def clip_inputs(self, rows: Tensor, log_probs: Tensor, seed: int = 0) -> ClipInputs:
        """What a policy reads for these rows; ``log_probs`` is ``(R, T)``, as wide as the whole batch."""
        assert self.old_log_probs is not None, "old_log_probs are recorded before the first update"
        device = log_probs.device
        assert log_probs.shape[1] == self.response_mask.shape[1], "inputs are as wide as the batch, however its rows are cut"
        return ClipInputs(
            log_probs=log_probs,
            old_log_probs=self.old_log_probs[rows].to(device),
            advantages=self.advantages[rows].to(device),
            response_mask=self.response_mask[rows].to(device),
            rollout_log_probs=self.rollout_log_probs[rows].to(device),
            seed=seed,
        )

    def micro_batches(self, rows: Tensor, max_tokens: int, packed: bool = False, cost: int = 256) -> Iterator[Tensor]:
        """Cut rows into batches of similar length that hold at most ``max_tokens``; one row may exceed it.

        Padded, a batch holds ``rows x longest row`` tokens; packed, the sum of its rows.

        Args:
            rows: of this experience.
            max_tokens: of a batch.
            packed: whether the rows of a batch stand end to end.
            cost: what a batch costs beside its tokens, in tokens; see `micro_batch_cost`.
        """
        by_length = torch.tensor(sorted(rows.tolist(), key=lambda row: self.sequences[row].numel(), reverse=True))
        lengths = [self.sequences[row].numel() for row in by_length.tolist()]
        start = 0
        for size in _packed_sizes(lengths, max_tokens) if packed else _padded_sizes(lengths, max_tokens, cost):
            yield by_length[start : start + size]
            start += size


def micro_batch_tokens(limit: int | None, *, is_cpu: bool, depth: int) -> int:
    """Tokens of a micro-batch at most; without a limit, as many as keep a GPU busy, or as stay in a processor's cache.

    Args:
        limit: what the settings say.
        is_cpu: whether the model is on a processor.
        depth: hidden numbers of a token in all layers, layers x width: a large model's fewer tokens are work enough.
    """
    return limit or (max(512, min(3072, 2**24 // depth)) if is_cpu else 16384)


def micro_batch_cost(*, is_cpu: bool, depth: int) -> int:
    """What a forward and backward pass costs beside its tokens, in tokens: less padding is not worth ever more batches.

    On a processor, as measured: the calls of a small model's operations take as long as hundreds of its tokens.

    Args:
        is_cpu: whether the model is on a processor.
        depth: layers x width.
    """
    return 48 + 2**16 // depth if is_cpu else 256


def _packed_sizes(lengths: Sequence[int], max_tokens: int) -> Iterator[int]:
    """Rows of each batch, as many as fit."""
    start = 0
    while start < len(lengths):
        size = max(1, sum(total <= max_tokens for total in accumulate(lengths[start:])))
        yield size
        start += size


def _padded_sizes(lengths: Sequence[int], max_tokens: int, cost: int) -> Iterator[int]:
    """Rows of each batch, such that all of them cost the least.

    Args:
        lengths: of the rows, the longest first.
        max_tokens: of one batch, padding included.
        cost: of a batch beside its tokens, in tokens.
    """
    number = len(lengths)
    costs, sizes = [0.0] * (number + 1), [0] * number
    for start in range(number - 1, -1, -1):
        longest = lengths[start]
        most = max(1, min(number - start, max_tokens // longest))
        # of equal costs the larger batch, so that what is left over is at the end
        costs[start], negative = min((cost + longest * size + costs[start + size], -size) for size in range(1, most + 1))
        sizes[start] = -negative
    start = 0
    while start < number:
        yield sizes[start]
        start += sizes[start]
