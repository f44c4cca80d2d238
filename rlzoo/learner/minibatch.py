"""Measures how a rule treated the responses of one minibatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rlzoo.config.sections import LearnerConfig
from rlzoo.core import ops
from rlzoo.core.errors import PolicyError
from rlzoo.core.policy import ClipPolicy
from rlzoo.core.reductions import StepCounts, kl_estimate
from rlzoo.learner.batch import AdvantageBatch
from rlzoo.learner.judge import Judgement
from rlzoo.learner.on_policy import on_policy_gradient
from rlzoo.measure.response_table import ResponseTable, group_keys


@dataclass(frozen=True, slots=True)
class Minibatch:
    """Measurements of one minibatch across all processes, before the weights change."""

    rows: Tensor  # (R,) rows of the batch
    log_probs: Tensor  # (R, T) from the model just before the step, on the CPU
    entropy: Tensor  # (R, T) in nats, from the same pass as log_probs
    table: ResponseTable  # describes the n responses that the rule has judged
    table_rows: Tensor  # (n,) row of the batch that each row of the table describes
    clipped: Tensor  # (n, T) bool: the model's tokens whose gradient the rule cut, on the CPU
    rule_metrics: Mapping[str, float]  # means of the rule's metrics over the responses
    objective: float
    learns: bool  # whether there is a gradient to apply

    @classmethod
    def of(cls, rows: Tensor, scores: Tensor, shares: Sequence[Share]) -> Minibatch:
        """Combine the shares of all processes with the log-probs and entropies ``(2, R, T)`` of all rows."""
        table_rows, tables, clipped, sums, objectives, learns = zip(*shares, strict=True)
        table = ResponseTable.concat(tables)
        means = {name: sum(share[name] for share in sums) / len(table.length) for name in sums[0]}
        return cls(
            rows, scores[0], scores[1], table, torch.cat(table_rows), torch.cat(clipped), means, sum(objectives), any(learns)
        )


class Share(NamedTuple):
    """Measurements of the n responses that one process has judged."""

    rows: Tensor  # (n,)
    table: ResponseTable
    clipped: Tensor  # (n, T) bool, on the CPU
    metric_sums: dict[str, float]
    objective: float
    learns: bool


def measure(
    policy: ClipPolicy,
    config: LearnerConfig,
    batch: AdvantageBatch,
    judged: Sequence[tuple[Tensor, Judgement, Tensor]],
    counts: StepCounts,
    max_length: int,
) -> Share:
    """Measure the results that a rule returned for the responses of one process.

    Args:
        policy: the rule.
        config: settings of the learner.
        batch: the batch.
        judged: for each evaluation of the rule, the rows of the batch, the judgement, and the entropies in nats.
        counts: denominators of the whole minibatch, for the rows of the batch.
        max_length: constant of the reduction ``constant_length``, in tokens.

    Raises:
        PolicyError: the rule reported different metrics for different micro-batches, or has an undeclared gradient where the
            advantage is 0.
    """
    judged_rows, judgements, entropies = zip(*judged, strict=True)
    rows, judgement = torch.cat(judged_rows), Judgement.concat(policy, judgements)
    inputs, result, gradient = judgement.inputs, judgement.result, judgement.gradient
    silent = gradient[(inputs.advantages == 0).all(dim=-1)].nan_to_num(0.0)  # NaN comes from the model
    if policy.scope != "batch" and not policy.learns_without_advantages and bool(silent.any()):
        raise PolicyError(
            policy.name,
            "has a nonzero gradient for a response with advantage 0; if this is intended, set learns_without_advantages = True",
        )
    kl = None
    if config.kl_coef > 0:
        kl = kl_estimate(inputs.log_probs, batch.reference(rows, gradient.device), config.kl_estimator, inputs.old_log_probs)
    table = ResponseTable.measure(
        inputs,
        result,
        gradient,
        on_policy_gradient(policy, inputs, result, counts.select(rows), max_length, batch.weights_of(rows)),
        group=group_keys(batch.step, batch.group_ids[rows]),
        entropy=torch.cat(entropies),
        kl=kl,
        turn_ids=batch.turn_ids[rows],
    )
    means = {name: ops.per_response(values.detach().float(), inputs.response_mask) for name, values in result.metrics.items()}
    return Share(
        rows,
        table,
        result.clipped.cpu() & batch.response_mask[rows],
        {name: float(values.sum()) for name, values in means.items()},
        float(judgement.objective),
        bool((inputs.advantages != 0).any() or gradient.any()) or config.kl_coef > 0 or config.entropy_coef > 0,
    )
