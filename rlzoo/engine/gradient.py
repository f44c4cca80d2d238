"""The gradient of one optimizer step's loss, added up micro-batch by micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlzoo.analysis.response_table import ResponseTable
from rlzoo.engine.experience import Experience
from rlzoo.engine.judge import judgement
from rlzoo.engine.optimization import Optimization
from rlzoo.engine.passes import Passes, gather
from rlzoo.policy import ClipPolicy
from rlzoo.reductions import StepCounts, kl_estimate, reduce_objective
from rlzoo.sections import LearnerConfig
from rlzoo.types import ClipInputs


@dataclass(frozen=True, slots=True)
class StepMeasures:
    """What a step's rows came to, over all processes, before the weights changed.

    Example:
        ``measures.objective`` is J itself.
    """

    log_probs: Tensor  # (R, T) of the step's rows, on the CPU
    table: ResponseTable
    objective: float


class StepGradient:
    """One step: its rows are judged by the policy, and the gradient of its loss is added to the model's.

    The policy is differentiated with respect to the log-probabilities alone, g = dJ/dlog_probs, and
    ``sum(g * log_probs)`` is back-propagated through the model: exact for every rule, since log_probs is all a rule sees.
    Rows with g = 0 need no backward pass. As a rule those are the rows without an advantage, so these go first, forwards
    only; should the rule give one of them a gradient, they all go the whole way after that.
    """

    def __init__(
        self,
        experience: Experience,
        rows: Tensor,
        *,
        policy: ClipPolicy,
        config: LearnerConfig,
        passes: Passes,
        optimization: Optimization,
        max_length: int,
        seed: int,
        is_first: bool = False,
    ) -> None:
        self.experience = experience
        self.rows = rows
        self.policy = policy
        self.config = config
        self.passes = passes
        self.optimization = optimization
        self.max_length = max_length
        self.seed = seed
        self.is_first = is_first  # of its experience: the old log-probs are those of this very pass
        lengths = experience.lengths[rows]
        # the step's denominators, fixed before its first backward pass, over all micro-batches and processes
        self.counts = StepCounts(num_responses=int((lengths > 0).sum()), num_tokens=int(lengths.sum()))
        self.log_probs = torch.zeros(experience.response_mask.shape)
        self.measured: list[tuple[ResponseTable, float]] = []

    def add_up(self, *, learns: bool = True) -> StepMeasures:
        """Judge the rows and, if the step ``learns``, add its gradient to the model's."""
        if self.policy.scope == "batch":
            return self._whole_step(learns)
        silent = torch.ones(len(self.rows), dtype=torch.bool)
        if learns:
            silent = (self.experience.advantages[self.rows] == 0).all(dim=1) & (self.config.kl_coef == 0)
        if self._measure(self.rows[silent]) and learns:
            silent[:] = False
            self.measured.clear()
        if learns:
            self._back_propagate(self.rows[~silent])
        measured = gather(self.passes.accelerator, self.measured)
        table = ResponseTable.concat([table for table, _ in measured])
        return StepMeasures(self.passes.sum(self.log_probs)[self.rows], table, sum(share for _, share in measured))

    def _measure(self, rows: Tensor) -> bool:
        """Judge rows in a forward pass; returns whether any of them has a gradient."""
        has_gradient = False
        for piece in self.passes.micro_batches(self.experience, rows):
            with torch.no_grad():
                current, entropy = self.passes.forward(self.optimization.model, self.experience, piece.rows)
            if not piece.is_idle:
                has_gradient |= bool(self._judge(piece.rows, current, entropy).any())
                self._note(piece.rows, current)
        return self.passes.any(has_gradient)

    def _back_propagate(self, rows: Tensor, gradient: Tensor | None = None) -> None:
        """Forward and backward passes; the rows' g is given, or judged on the way."""
        pieces = self.passes.micro_batches(self.experience, rows)
        for index, piece in enumerate(pieces):
            with self.optimization.micro_batch(is_last=index == len(pieces) - 1):
                current, entropy = self.passes.forward(self.optimization.model, self.experience, piece.rows)
                if piece.is_idle:
                    g = torch.zeros_like(current)
                elif gradient is None:
                    g = self._judge(piece.rows, current, entropy)
                    self._note(piece.rows, current)
                else:
                    g = gradient[piece.rows, : current.shape[1]].to(current.device)
                self.optimization.backward(-(g * current).sum())

    def _whole_step(self, learns: bool) -> StepMeasures:
        """For a rule that looks at the whole step: all log-probs first, without gradient, then the policy once."""
        log_probs, entropy = self.passes.log_probs(self.optimization.model, self.experience, self.rows)
        device = self.passes.accelerator.device
        g = self._judge(self.rows, log_probs[self.rows].to(device), entropy[self.rows].to(device)).cpu()
        if learns:
            heard = (g != 0).any(dim=1)
            gradient = torch.zeros(log_probs.shape)
            gradient[self.rows] = g
            self._back_propagate(self.rows[heard] if heard.any() else self.rows[:1], gradient)
        ((table, objective),) = self.measured
        return StepMeasures(log_probs[self.rows], table, objective)

    def _note(self, rows: Tensor, log_probs: Tensor) -> None:
        self.log_probs[rows, : log_probs.shape[1]] = log_probs.detach().float().cpu()

    def _judge(self, rows: Tensor, log_probs: Tensor, entropy: Tensor) -> Tensor:
        """The policy on some rows: the loss's g = dJ/dlog_probs ``(R, T)``; their measurements are kept."""
        experience = self.experience
        inputs = experience.clip_inputs(rows, log_probs.detach(), self.seed)
        if self.is_first:
            inputs = replace(inputs, old_log_probs=inputs.log_probs.clone())
        weights = experience.mismatch_weights
        if weights is not None:
            weights = weights[rows, : log_probs.shape[1]].to(log_probs.device)
        with torch.enable_grad():
            judged = judgement(self.policy, inputs, self.counts, self.max_length, weights)
        gradient, kl = judged.gradient, None
        if self.config.kl_coef > 0:
            kl, kl_gradient = self._kl(rows, inputs)
            gradient = gradient - self.config.kl_coef * kl_gradient
        table = ResponseTable.measure(
            inputs,
            judged.result,
            judged.gradient,
            judged.on_policy_gradient,
            group=experience.group_ids[rows].to(log_probs.device),
            entropy=entropy,
            kl=kl,
        )
        self.measured.append((table, judged.objective))
        return gradient

    def _kl(self, rows: Tensor, inputs: ClipInputs) -> tuple[Tensor, Tensor]:
        """The KL to the reference per token, ``(R, T)``, and the gradient of its reduction for log_probs."""
        assert self.experience.ref_log_probs is not None, "the reference's log-probs are recorded before the first update"
        leaf = inputs.log_probs.detach().requires_grad_()
        ref_log_probs = self.experience.ref_log_probs[rows, : leaf.shape[1]].to(leaf.device)
        with torch.enable_grad():
            kl = kl_estimate(leaf, ref_log_probs, self.config.kl_estimator)
            total = reduce_objective(kl, inputs.response_mask, self.policy.reduction, self.counts, self.max_length)
            (gradient,) = torch.autograd.grad(total, leaf)
        return kl.detach(), gradient
