"""The rollout file and the text records that a run directory stores for each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from rlzoo.config.redaction import redact_settings
from rlzoo.config.run_config import RunConfig
from rlzoo.core import ops
from rlzoo.journal.rollout_file import RolloutFile, UpdateLogProbs
from rlzoo.learner.batch import AdvantageBatch, ScoredBatch
from rlzoo.learner.learner import Update
from rlzoo.rollout.types import Rollout, RolloutGroup
from rlzoo.support.distribution import version


def rollout_file(
    config: RunConfig, batch: AdvantageBatch, groups: Sequence[RolloutGroup], updates: Sequence[Update], learner_version: int
) -> RolloutFile:
    """Build the contents of a rollout file.

    The rewards are the shaped rewards from which the advantages were computed. The named rewards are unchanged from what the
    task returned. The old log-probs are omitted if the step failed before they were computed.
    """
    mask, advantages = batch.response_mask, batch.advantages
    whole_rows = [torch.zeros(size, dtype=torch.bool) for size in batch.sizes]
    for row, start, chosen in zip(whole_rows, batch.prompt_lengths.tolist(), mask, strict=True):
        row[start:] = chosen[: len(row) - start]
    names = ("old_log_probs", "old_entropy", "ref_log_probs") if isinstance(batch, ScoredBatch) else ()
    scores, minibatches = {name: getattr(batch, name) for name in names}, [update.minibatch for update in updates]
    return RolloutFile(
        step=batch.step,
        token_ids=torch.cat(batch.sequences),
        sequence_lengths=torch.tensor(batch.sizes),
        response_mask=torch.cat(whole_rows),
        group_ids=batch.group_ids,
        rewards=batch.rewards,
        reward_parts=batch.reward_parts or {},
        advantages=advantages[:, 0] if advantages.shape[-1] == 1 else advantages[mask],
        turn_ids=batch.turn_ids[mask],
        finished=batch.finished,
        policy_versions=policy_versions([rollout for group in groups for rollout in group.rollouts]),
        rollout_log_probs=batch.rollout_log_probs[mask],
        **({} if batch.kept is None else {"kept_ids": batch.kept.ids, "kept_sizes": batch.kept.sizes}),
        **{name: values[mask] for name, values in scores.items() if values is not None},
        values=None if batch.values is None else batch.values[mask],
        last_values=None if batch.last_values is None else batch.last_values[:, 0],
        updates=tuple(UpdateLogProbs(minibatch.rows, minibatch.log_probs[mask[minibatch.rows]]) for minibatch in minibatches),
        learner_version=learner_version,
        temperature=config.rollout.temperature,
        max_length=config.rollout.max_new_tokens,
        num_steps=config.steps,
        seed=batch.seed,
        rule={"name": config.clip.name, **redact_settings(config.clip.model_dump(mode="json"))},
        model=config.model.path,
        writer=f"rlzoo {version()}",
    )


def policy_versions(rollouts: Sequence[Rollout]) -> Tensor:
    """Return the version of the weights that sampled each response, or each token if versions differ within a response."""
    if any(rollout.token_versions for rollout in rollouts):
        return torch.tensor([version for rollout in rollouts for version in rollout.versions])
    return torch.tensor([rollout.policy_version for rollout in rollouts])


def transcripts(groups: Sequence[RolloutGroup], batch: AdvantageBatch, updates: Sequence[Update]) -> Iterator[dict[str, Any]]:
    """Yield the responses of a step in readable form, one object per response.

    ``clipped`` is the share of tokens that were clipped at the response's last update, or None if the step had no update.
    """
    advantages = ops.per_response(batch.advantages, batch.response_mask)[:, 0].tolist()
    clipped = clipped_shares(batch, updates) if updates else [None] * len(batch)
    row = 0
    for index, group in enumerate(groups):
        for rollout in group.rollouts:
            yield {
                "group": index,
                "question": group.problem.question,
                "answer": group.problem.answer,
                "response": rollout.transcript,
                "length": rollout.length,
                "reward": rollout.reward,
                **({"reward_parts": dict(rollout.reward_parts)} if rollout.reward_parts else {}),
                "advantage": advantages[row],
                "clipped": clipped[row],
                "finished": rollout.finished,
                "policy_version": rollout.policy_version,
                **({"policy_version_last": rollout.token_versions[-1]} if rollout.token_versions else {}),
                **({"opening": rollout.opening, "turns": [asdict(turn) for turn in rollout.turns]} if rollout.turns else {}),
                **({"failure": rollout.failure} if rollout.failure else {}),
            }
            row += 1


def clipped_shares(batch: AdvantageBatch, updates: Sequence[Update]) -> list[float]:
    """Return the share of tokens clipped at the last update of each response, or 0 for a response without updates."""
    shares = torch.zeros(len(batch))
    for update in updates:
        rows = update.minibatch.table_rows
        shares[rows] = ops.per_response(update.minibatch.clipped.float(), batch.response_mask[rows])[:, 0]
    return shares.tolist()
