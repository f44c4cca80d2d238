"""The learner: turns an experience into optimizer steps, with one denominator per step."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlzoo.analysis.response_table import ResponseTable
from rlzoo.engine.experience import Experience, PaddingSide
from rlzoo.engine.judge import judgement, updated
from rlzoo.engine.model import ResponseLogProbs
from rlzoo.engine.shaping import with_kl_in_the_reward
from rlzoo.errors import UserError
from rlzoo.fairness import bin_edges
from rlzoo.policy import ClipPolicy
from rlzoo.reductions import StepCounts, kl_estimate, reduce_objective
from rlzoo.sections import LearnerConfig, RewardConfig
from rlzoo.types import ClipInputs

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer step: what it was computed from and what came of it.

    Example:
        ``update.objective`` is J itself, over the whole step; ``update.log_probs`` allows it to be replayed.
    """

    rows: Tensor  # (R,) rows of the experience
    log_probs: Tensor  # (R, T) of the model just before the step, on the CPU
    table: ResponseTable
    objective: float
    grad_norm: float  # before clipping
    grad_clipped: bool
    skipped: bool  # nothing to learn (every advantage 0), or a gradient that is not finite
    lr: float


@dataclass(frozen=True, slots=True)
class WholeStep:
    """What a rule of scope "batch" answers for a whole step.

    Example:
        ``whole.gradient[rows]`` is g for those rows.
    """

    gradient: Tensor  # (B, T) dJ/dlog_probs, 0 outside the step's rows
    table: ResponseTable
    objective: float


class Learner:
    """Owns the optimizer and the policy's current state.

    The policy is differentiated with respect to the log-probabilities alone, g = dJ/dlog_probs, and
    ``sum(g * log_probs)`` is back-propagated through the model: exact for every rule, since log_probs is all a rule sees.
    """

    def __init__(
        self,
        language_model: PreTrainedModel,
        policy: ClipPolicy,
        config: LearnerConfig,
        *,
        pad_id: int,
        max_length: int,
        num_updates: int,
        temperature: float = 1.0,
        padding_side: PaddingSide = "left",
        reward: RewardConfig | None = None,
    ) -> None:
        from accelerate import Accelerator
        from transformers import get_scheduler

        self.policy = policy
        self.config = config
        self.reward = reward or RewardConfig()
        self.pad_id = pad_id
        self.max_length = max_length
        self.padding_side: PaddingSide = padding_side
        self.num_optimizer_steps = 0
        self.accelerator: Accelerator = Accelerator(mixed_precision="bf16" if config.autocast == "bfloat16" else "no")
        module = ResponseLogProbs(language_model, temperature)
        self.reference: ResponseLogProbs | None = None
        if config.kl_coef > 0 or self.reward.kl_coef > 0:
            self.reference = copy.deepcopy(module).requires_grad_(False).to(self.accelerator.device)
        optimizer = torch.optim.AdamW(
            module.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )
        self.model, self.optimizer = self.accelerator.prepare(module, optimizer)
        self.scheduler = get_scheduler(
            "constant_with_warmup" if config.schedule == "constant" else config.schedule,
            optimizer,
            num_warmup_steps=config.warmup_updates,
            num_training_steps=num_updates,
        )

    def update(
        self, experience: Experience, seed: int, before_update: Callable[[int], None] | None = None
    ) -> tuple[Experience, list[Update]]:
        """Take every optimizer step of one rollout batch.

        Args:
            experience: the graded rollouts.
            seed: decides which responses share a minibatch, and what rules draw that draw at random.
            before_update: told the number of each update, from 0, before its first forward pass.

        Returns:
            The experience with its ``old_log_probs`` filled in, and the advantages that follow from them where the reward
            has a KL; and the steps in order.
        """
        experience = self.with_old_log_probs(experience)
        if self.reward.kl_coef > 0:
            experience = with_kl_in_the_reward(experience, self.policy.advantage, self.reward)
        edges = bin_edges(experience.lengths)
        rng = torch.Generator().manual_seed(seed)
        updates: list[Update] = []
        for _ in range(self.config.num_epochs):
            for rows in torch.randperm(len(experience), generator=rng).chunk(self.config.num_minibatches):
                if before_update is not None:
                    before_update(len(updates))
                update = self.step(experience, rows, seed + len(updates))
                updates.append(update)
                self.policy = updated(self.policy, update.table.clip_stats(edges))
        return experience, updates

    @torch.no_grad()
    def with_old_log_probs(self, experience: Experience) -> Experience:
        """Record the log-probs of the policy before its first update, and of the reference if there is one."""
        rows = torch.arange(len(experience))
        old = self._log_probs_of(self.model, experience, rows)
        if self.reference is None:
            return replace(experience, old_log_probs=old)
        with self.accelerator.autocast():
            return replace(experience, old_log_probs=old, ref_log_probs=self._log_probs_of(self.reference, experience, rows))

    def step(self, experience: Experience, rows: Tensor, seed: int = 0) -> Update:
        """One optimizer step on some rows of the experience."""
        lr = float(self.scheduler.get_last_lr()[0])
        log_probs, table, objective = self.accumulate(experience, rows, seed)
        limit = self.config.max_grad_norm
        norm = float(self.accelerator.clip_grad_norm_(self.model.parameters(), limit or float("inf")))
        nothing_to_learn = self.config.kl_coef == 0 and not bool((experience.advantages[rows] != 0).any())
        skipped = nothing_to_learn or not torch.isfinite(torch.tensor(norm)).item()
        if not skipped:
            self.optimizer.step()
            self.scheduler.step()
            self.num_optimizer_steps += 1
        self.optimizer.zero_grad()
        clipped = limit is not None and norm > limit
        return Update(rows, log_probs, table, objective, norm, clipped, skipped, lr)

    def accumulate(self, experience: Experience, rows: Tensor, seed: int = 0) -> tuple[Tensor, ResponseTable, float]:
        """Add the gradient of one step's loss to the parameters' ``.grad``, micro-batch by micro-batch.

        Returns:
            The rows' log-probs ``(R, T)``, their measurements in the micro-batches' order, and the objective J.
        """
        counts = self._counts(experience, rows)
        pieces = list(experience.micro_batches(rows, self.config.max_tokens_per_micro_batch))
        g = self._whole_step_gradient(experience, rows, counts, seed) if self.policy.scope == "batch" else None
        log_probs = torch.zeros(experience.response_mask.shape)
        tables, objective = [], 0.0
        for index, piece in enumerate(pieces):
            last = index == len(pieces) - 1
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self.model):
                flat, entropy = self._forward(self.model, experience, piece)
                current = experience.scatter(piece, flat)
                if g is None:
                    spread = experience.scatter(piece, entropy)
                    upstream, table, share = self._judge(experience, piece, current, counts, spread, seed)
                    tables.append(table)
                    objective += share
                else:
                    upstream = g.gradient[piece, : current.shape[1]].to(current.device)
                # data-parallel averaging over ranks is undone here; the counts are already the whole step's
                self.accelerator.backward(-(upstream * current).sum() * self.accelerator.num_processes)
                log_probs[piece, : current.shape[1]] = current.detach().float().cpu()
        if g is not None:
            tables, objective = [g.table], g.objective
        return log_probs[rows], ResponseTable.concat(tables), objective

    def _judge(
        self, experience: Experience, rows: Tensor, log_probs: Tensor, counts: StepCounts, entropy: Tensor, seed: int
    ) -> tuple[Tensor, ResponseTable, float]:
        """The policy on these rows: the loss's g = dJ/dlog_probs ``(R, T)``, their measurements, their share of J."""
        inputs = experience.clip_inputs(rows, log_probs.detach(), seed)
        judged = judgement(self.policy, inputs, counts, self.max_length)
        gradient, kl = judged.gradient, None
        if self.config.kl_coef > 0:
            kl, kl_gradient = self._kl(experience, rows, inputs, counts)
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
        return gradient, table, judged.objective

    def _kl(self, experience: Experience, rows: Tensor, inputs: ClipInputs, counts: StepCounts) -> tuple[Tensor, Tensor]:
        """The KL to the reference per token, ``(R, T)``, and the gradient of its reduction for log_probs."""
        assert experience.ref_log_probs is not None, "the reference's log-probs are recorded before the first update"
        leaf = inputs.log_probs.detach().requires_grad_()
        ref_log_probs = experience.ref_log_probs[rows, : leaf.shape[1]].to(leaf.device)
        kl = kl_estimate(leaf, ref_log_probs, self.config.kl_estimator)
        total = reduce_objective(kl, inputs.response_mask, self.policy.reduction, counts, self.max_length)
        (gradient,) = torch.autograd.grad(total, leaf)
        return kl.detach(), gradient

    def _whole_step_gradient(self, experience: Experience, rows: Tensor, counts: StepCounts, seed: int) -> WholeStep:
        """The g of a rule that looks at the whole step: log-probs first, without gradient, then the policy once."""
        if self.accelerator.num_processes > 1:
            raise UserError(f"clip policy {self.policy.name!r} has scope 'batch', which runs in one process")
        entropy = torch.zeros(experience.response_mask.shape)
        with torch.no_grad():
            log_probs = self._log_probs_of(self.model, experience, rows, entropy)
        gradient = torch.zeros(experience.response_mask.shape)
        current, spread = log_probs[rows].to(self.accelerator.device), entropy[rows].to(self.accelerator.device)
        g, table, objective = self._judge(experience, rows, current, counts, spread, seed)
        gradient[rows] = g.cpu()
        return WholeStep(gradient, table, objective)

    def _log_probs_of(
        self, model: torch.nn.Module, experience: Experience, rows: Tensor, entropy: Tensor | None = None
    ) -> Tensor:
        """Log-probs ``(B, T)`` of some rows, 0 elsewhere; entropies are written into ``entropy``, if given."""
        log_probs = torch.zeros(experience.response_mask.shape)
        for piece in experience.micro_batches(rows, self.config.max_tokens_per_micro_batch):
            flat, spread = self._forward(model, experience, piece)
            current = experience.scatter(piece, flat).float().cpu()
            log_probs[piece, : current.shape[1]] = current
            if entropy is not None:
                entropy[piece, : current.shape[1]] = experience.scatter(piece, spread).cpu()
        return log_probs

    def _forward(self, model: torch.nn.Module, experience: Experience, rows: Tensor) -> tuple[Tensor, Tensor]:
        batch = experience.model_batch(rows, self.pad_id, self.padding_side).to(self.accelerator.device)
        log_probs, entropy = model(batch)
        return log_probs, entropy

    def _counts(self, experience: Experience, rows: Tensor) -> StepCounts:
        """The step's denominators, fixed before its first backward pass, over all micro-batches and ranks."""
        lengths = experience.lengths[rows]
        counts = torch.tensor([int((lengths > 0).sum()), int(lengths.sum())], device=self.accelerator.device)
        responses, tokens = self.accelerator.reduce(counts, reduction="sum").tolist()
        return StepCounts(num_responses=int(responses), num_tokens=int(tokens))
