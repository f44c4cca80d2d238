"""Evaluates the rule on the responses of one optimizer step, micro-batch by micro-batch, and measures the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlzoo.core import ops
from rlzoo.core.errors import PolicyError
from rlzoo.core.reductions import StepCounts, kl_estimate, reduce_objective
from rlzoo.learner.judge import Judgement, judgement
from rlzoo.learner.micro_batches import MicroBatch
from rlzoo.learner.on_policy import on_policy_gradient
from rlzoo.measure.response_table import ResponseTable, group_keys
from rlzoo.models.processes import gather

if TYPE_CHECKING:
    from rlzoo.config.sections import LearnerConfig
    from rlzoo.core.policy import ClipPolicy
    from rlzoo.core.types import ClipInputs
    from rlzoo.learner.batch import ScoredBatch
    from rlzoo.learner.micro_batches import MicroBatches


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of one minibatch across all processes, before the weights change."""

    rows: Tensor  # (R,) rows of the batch
    log_probs: Tensor  # (R, T) from the model just before the step, on the CPU
    entropy: Tensor | None  # (R, T) in nats, from the same pass as log_probs; None unless the rule needs it
    clipped: Tensor  # (R, T) bool: the model's tokens whose gradient the rule cut, on the CPU
    table: ResponseTable
    table_rows: Tensor  # (R,) the batch row that each row of the table describes
    rule_metrics: Mapping[str, float]  # means of the rule's metrics over the responses
    objective: float
    learns: bool  # whether there is a gradient to apply


def learns_without_advantages(config: LearnerConfig, policy: ClipPolicy) -> bool:
    """Return whether responses with advantage 0 can have a gradient, from the rule, a KL term or an entropy bonus."""
    return policy.learns_without_advantages or config.kl_coef > 0 or config.entropy_coef > 0


@dataclass
class Minibatch:
    """Collects the rule's results on one minibatch."""

    batch: ScoredBatch
    rows: Tensor
    policy: ClipPolicy
    config: LearnerConfig
    max_length: int
    seed: int
    progress: float = 0.0

    def __post_init__(self) -> None:
        batch, rows, policy = self.batch, self.rows, self.policy
        # denominators of the whole step, across all micro-batches and processes
        self.counts = StepCounts.of(batch.response_mask[rows])
        self.log_probs = torch.zeros(batch.response_mask.shape)
        self.entropy = torch.zeros(batch.response_mask.shape) if "old_entropy" in policy.needs else None
        self.clipped = torch.zeros(batch.response_mask.shape, dtype=torch.bool)
        self._judged: list[tuple[Tensor, Judgement, Tensor, Tensor | None]] = []  # rows, judgement, entropy, KL
        self._gradient: Tensor | None = None  # (B, T) for a rule of scope "batch", evaluated before the first backward pass

    def judge_whole(self, log_probs: Tensor, entropy: Tensor) -> Tensor:
        """Evaluate a rule of scope "batch" on the whole minibatch, and return the rows that need a backward pass.

        Args:
            log_probs: ``(B, T)``, detached.
            entropy: ``(B, T)`` in nats.
        """
        whole = MicroBatch(self.rows, learns=False, is_idle=False)
        gradient = self.gradient(whole, log_probs[self.rows], entropy[self.rows])
        self._gradient = torch.zeros(self.log_probs.shape, device=gradient.device)
        self._gradient[self.rows] = gradient
        graded = self.batch.graded[self.rows]
        acting = graded & (gradient.any(dim=1).cpu() | (self.config.entropy_coef > 0))
        # at least one row, because a step needs a backward pass
        return self.rows[acting] if acting.any() else self.rows[graded][:1]

    def gradient(self, piece: MicroBatch, log_probs: Tensor, entropy: Tensor) -> Tensor:
        """Evaluate the rule on a micro-batch and return g = dJ/dlog_probs ``(R, T)``, including the KL term.

        The rule does not see responses without a grade; their gradient is 0.

        Raises:
            PolicyError: the rule failed, or reported different metrics for different micro-batches.
        """
        if piece.is_idle:
            return torch.zeros_like(log_probs)
        if self._gradient is not None:
            return self._gradient[piece.rows].to(log_probs.device)
        self.log_probs[piece.rows] = log_probs.detach().float().cpu()
        if self.entropy is not None:
            self.entropy[piece.rows] = entropy.detach().float().cpu()
        whole, graded = torch.zeros_like(log_probs), self.batch.graded[piece.rows].nonzero()[:, 0]
        if len(graded) == 0:
            return whole
        places = graded.to(log_probs.device)
        rows, log_probs, entropy = piece.rows[graded], log_probs[places], entropy[places]
        inputs = self.batch.clip_inputs(
            rows,
            log_probs.detach(),
            self.seed,
            needs=self.policy.needs,
            entropy=entropy,
            max_length=self.max_length,
            progress=self.progress,
        )
        weights = self.batch.weights
        factors = None if weights is None else weights[rows].to(log_probs.device)
        judged = judgement(self.policy, inputs, self.counts, self.max_length, factors)
        names = judged.result.metrics.keys()
        if self._judged and names != (before := self._judged[0][1].result.metrics.keys()):
            raise PolicyError(
                self.policy.name,
                f"returned metrics {sorted(names)} for some responses and {sorted(before)} for others; "
                "return the same metrics for all responses",
            )
        gradient, kl = self._less_kl(judged.gradient, rows, inputs)
        self._judged.append((rows, judged, entropy.detach(), kl))
        self.clipped[rows] = judged.result.clipped.cpu() & self.batch.response_mask[rows]
        return whole.index_copy(0, places, gradient)

    def entropy_bonus(self, piece: MicroBatch, entropy: Tensor) -> Tensor:
        """Return the objective's entropy term, given the entropies ``(R, T)``: the coefficient times the reduced entropy."""
        if piece.is_idle:
            return 0.0 * entropy.sum()
        mask = self.batch.response_mask[piece.rows].to(entropy.device)
        reduced = reduce_objective(entropy, mask, self.policy.reduction, self.counts, self.max_length)
        return self.config.entropy_coef * reduced

    def measured(self, micro_batches: MicroBatches) -> Measured:
        """Combine the measurements of all micro-batches and processes."""
        measured = [self._measured()] if self._judged else []
        if self._gradient is None:  # otherwise every process evaluated the whole minibatch
            measured = gather(micro_batches.accelerator, measured)
            self.log_probs = micro_batches.sum(self.log_probs)
            self.clipped = micro_batches.sum(self.clipped.to(torch.uint8)).bool()
            self.entropy = None if self.entropy is None else micro_batches.sum(self.entropy)
        rows, tables, sums, objectives, has_gradient = zip(*measured, strict=True)
        has_advantages = bool((self.batch.advantages[self.rows] != 0).any())
        learns = has_advantages or any(has_gradient)
        table = ResponseTable.concat(tables)
        means = {name: sum(part[name] for part in sums) / len(table.length) for name in sums[0]}
        return Measured(
            self.rows,
            self.log_probs[self.rows],
            None if self.entropy is None else self.entropy[self.rows],
            self.clipped[self.rows],
            table,
            torch.cat(rows),
            means,
            sum(objectives),
            learns,
        )

    def _measured(self) -> tuple[Tensor, ResponseTable, dict[str, float], float, bool]:
        """Return this process's rows, response table, metric sums and objective, and whether there is a gradient."""
        rows, judgements, entropies, kls = zip(*self._judged, strict=True)
        judged, own = Judgement.concat(judgements), torch.cat(rows)
        factors = None if self.batch.weights is None else self.batch.weights[own].to(judged.gradient.device)
        at_ratio_1 = on_policy_gradient(self.policy, judged.inputs, judged.result, self.counts, self.max_length, factors)
        silent = judged.gradient[(judged.inputs.advantages == 0).all(dim=-1)].nan_to_num(0.0)  # NaN comes from the model
        if self.policy.scope != "batch" and not self.policy.learns_without_advantages and bool(silent.any()):
            raise PolicyError(
                self.policy.name,
                "has a nonzero gradient for a response with advantage 0; if this is intended, set "
                "learns_without_advantages = True",
            )
        table = ResponseTable.measure(
            judged.inputs,
            judged.result,
            judged.gradient,
            at_ratio_1,
            group=group_keys(self.batch.step, self.batch.group_ids[own]),
            entropy=torch.cat(entropies),
            kl=None if kls[0] is None else torch.cat(kls),
            turn_ids=self.batch.turn_ids[own],
        )
        has_gradient = bool(judged.gradient.any()) or self.config.kl_coef > 0 or self.config.entropy_coef > 0
        mask, metrics = judged.inputs.response_mask, judged.result.metrics
        sums = {name: float(ops.per_response(values.detach().float(), mask).sum()) for name, values in metrics.items()}
        return own, table, sums, float(judged.objective), has_gradient

    def _less_kl(self, gradient: Tensor, rows: Tensor, inputs: ClipInputs) -> tuple[Tensor, Tensor | None]:
        """Subtract the gradient of the KL term from ``gradient``, and also return the per-token KL ``(R, T)``."""
        if self.config.kl_coef == 0:
            return gradient, None
        assert self.batch.ref_log_probs is not None, "the learner keeps a reference model if the loss has a KL term"
        leaf = inputs.log_probs.detach().requires_grad_()
        ref_log_probs = self.batch.ref_log_probs[rows].to(leaf.device)
        with torch.enable_grad():
            kl = kl_estimate(leaf, ref_log_probs, self.config.kl_estimator, inputs.old_log_probs)
            total = reduce_objective(kl, inputs.response_mask, self.policy.reduction, self.counts, self.max_length)
            (kl_gradient,) = torch.autograd.grad(total, leaf)
        return gradient - self.config.kl_coef * kl_gradient, kl.detach()
