"""The gradient of one optimizer step's loss, added up micro-batch by micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlzoo.measure.response_table import ResponseTable, prompt_ids
from rlzoo.learner.batch import Experience
from rlzoo.learner.judge import differentiated, judgement
from rlzoo.learner.optimization import Optimization
from rlzoo.learner.passes import Passes
from rlzoo.processes import gather
from rlzoo.policy import ClipPolicy
from rlzoo.reductions import StepCounts, kl_estimate, reduce_objective
from rlzoo.config.sections import LearnerConfig
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
    has_gradient: bool  # whether g is anything but 0, in any process


class StepGradient:
    """One step: its rows are judged by the policy, and the gradient of its loss is added to the model's.

    The policy is differentiated with respect to the log-probabilities alone, g = dJ/dlog_probs, and
    ``sum(g * log_probs)`` is back-propagated through the model: exact for every rule, since log_probs is all a rule sees.
    Rows with g = 0 need no backward pass. Those are the rows without an advantage, unless the policy declares that it learns
    from them, so these go forwards only; should the policy give one of them a gradient all the same, it goes the whole way
    after that.
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
        self.entropy = torch.zeros(experience.response_mask.shape)
        self.own: list[Tensor] = []  # rows of this process

    def add_up(self, *, learns: bool = True) -> StepMeasures:
        """Judge the rows and, if the step ``learns``, add its gradient to the model's."""
        if self.policy.scope == "batch":
            return self._whole_step(learns)
        silent = torch.ones(len(self.rows), dtype=torch.bool)
        if learns and self.config.kl_coef == 0 and not self.policy.learns_without_advantages:
            silent = (self.experience.advantages[self.rows] == 0).all(dim=1)
        elif learns:
            silent = torch.zeros(len(self.rows), dtype=torch.bool)
        self._listen(self.rows[silent])
        if learns:
            self._back_propagate(self.rows[~silent])
        measured, gradient = [], torch.zeros(self.log_probs.shape)
        if self.own:
            own = torch.cat(self.own)
            g, table, objective = self._judge_whole(own)
            measured, gradient[own] = [(table, objective, bool((g != 0).any()))], g.cpu()
        if learns:
            self._back_propagate_late(self.rows[silent], gradient)
        measured = gather(self.passes.accelerator, measured)
        tables, shares, nonzero = zip(*measured, strict=True)
        log_probs = self.passes.sum(self.log_probs)[self.rows]
        return StepMeasures(log_probs, ResponseTable.concat(tables), sum(shares), has_gradient=any(nonzero))

    def _listen(self, rows: Tensor) -> None:
        """Forward passes only."""
        for piece in self.passes.micro_batches(self.experience, rows):
            with torch.no_grad():
                current, entropy = self.passes.forward(self.optimization.model, self.experience, piece.rows)
            if not piece.is_idle:
                self._note(piece.rows, current, entropy)

    def _back_propagate_late(self, rows: Tensor, gradient: Tensor) -> None:
        """Rows that were expected to have no gradient and have one after all."""
        if self.passes.any(bool(gradient[rows].any())):
            gradient = self.passes.sum(gradient)
            self._back_propagate(rows[gradient[rows].any(dim=1)], gradient)

    def _back_propagate(self, rows: Tensor, gradient: Tensor | None = None) -> None:
        """Forward and backward passes; the rows' g is given, or judged on the way."""
        pieces = self.passes.micro_batches(self.experience, rows)
        for index, piece in enumerate(pieces):
            with self.optimization.micro_batch(is_last=index == len(pieces) - 1):
                current, entropy = self.passes.forward(self.optimization.model, self.experience, piece.rows)
                if piece.is_idle:
                    g = torch.zeros_like(current)
                elif gradient is None:
                    g = self._judge(piece.rows, current)
                    self._note(piece.rows, current, entropy)
                else:
                    g = gradient[piece.rows].to(current.device)
                self.optimization.backward(-(g * current).sum())

    def _whole_step(self, learns: bool) -> StepMeasures:
        """For a rule that looks at the whole step: all log-probs first, without gradient, then the policy once."""
        self.log_probs, self.entropy = self.passes.log_probs(self.optimization.model, self.experience, self.rows)
        g, table, objective = self._judge_whole(self.rows)
        heard = (g != 0).any(dim=1)
        if learns:
            gradient = torch.zeros(self.log_probs.shape)
            gradient[self.rows] = g.cpu()
            self._back_propagate(self.rows[heard.cpu()] if heard.any() else self.rows[:1], gradient)
        return StepMeasures(self.log_probs[self.rows], table, objective, has_gradient=bool(heard.any()))

    def _note(self, rows: Tensor, log_probs: Tensor, entropy: Tensor) -> None:
        self.own.append(rows)
        self.log_probs[rows] = log_probs.detach().float().cpu()
        self.entropy[rows] = entropy.float().cpu()

    def _inputs(self, rows: Tensor, log_probs: Tensor) -> tuple[ClipInputs, Tensor | None]:
        """What the policy reads, and the factors of its objective."""
        inputs = self.experience.clip_inputs(rows, log_probs.detach(), self.seed)
        if self.is_first:
            inputs = replace(inputs, old_log_probs=inputs.log_probs.clone())
        weights = self.experience.mismatch_weights
        return inputs, None if weights is None else weights[rows].to(log_probs.device)

    def _judge(self, rows: Tensor, log_probs: Tensor) -> Tensor:
        """The policy on some rows: the loss's g = dJ/dlog_probs ``(R, T)``."""
        inputs, weights = self._inputs(rows, log_probs)
        *_, gradient = differentiated(self.policy, inputs, self.counts, self.max_length, weights)
        return self._less_kl(gradient, rows, inputs)[0]

    def _judge_whole(self, rows: Tensor) -> tuple[Tensor, ResponseTable, float]:
        """The same for rows whose log-probs were noted, with their measurements and their share of J."""
        device = self.passes.accelerator.device
        inputs, weights = self._inputs(rows, self.log_probs[rows].to(device))
        judged = judgement(self.policy, inputs, self.counts, self.max_length, weights)
        gradient, kl = self._less_kl(judged.gradient, rows, inputs)
        group, entropy = prompt_ids(self.experience.step, self.experience.group_ids[rows]), self.entropy[rows].to(device)
        read, answered = (inputs, judged.result), (judged.gradient, judged.on_policy_gradient)
        return gradient, ResponseTable.measure(*read, *answered, group=group, entropy=entropy, kl=kl), judged.objective

    def _less_kl(self, gradient: Tensor, rows: Tensor, inputs: ClipInputs) -> tuple[Tensor, Tensor | None]:
        """``gradient`` less that of ``kl_coef`` times the reduced KL to the reference, and that KL per token ``(R, T)``."""
        if self.config.kl_coef == 0:
            return gradient, None
        assert self.experience.ref_log_probs is not None, "the reference's log-probs are recorded before the first update"
        leaf = inputs.log_probs.detach().requires_grad_()
        ref_log_probs = self.experience.ref_log_probs[rows].to(leaf.device)
        with torch.enable_grad():
            kl = kl_estimate(leaf, ref_log_probs, self.config.kl_estimator)
            total = reduce_objective(kl, inputs.response_mask, self.policy.reduction, self.counts, self.max_length)
            (kl_gradient,) = torch.autograd.grad(total, leaf)
        return gradient - self.config.kl_coef * kl_gradient, kl.detach()
