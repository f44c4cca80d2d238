"""The learner: turns an experience into optimizer steps, with one denominator per step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlzoo.analysis.response_table import ResponseTable
from rlzoo.engine.adapters import has_adapter, prepare_for_training, without_adapter
from rlzoo.engine.experience import Experience, PaddingSide
from rlzoo.engine.judge import judgement, updated
from rlzoo.engine.mismatch import with_mismatch_weights
from rlzoo.engine.model import ResponseLogProbs, check_packing
from rlzoo.engine.optimization import Applied, make_optimization, named_weights
from rlzoo.engine.passes import Passes, gather
from rlzoo.engine.processes import make_accelerator
from rlzoo.engine.shaping import with_kl_in_the_reward
from rlzoo.fairness import bin_edges
from rlzoo.policy import ClipPolicy
from rlzoo.reductions import StepCounts, kl_estimate, reduce_objective
from rlzoo.sections import LaunchConfig, LearnerConfig, MismatchConfig, RewardConfig
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

    With several processes, each holds the whole experience and computes its share of the rows; log-probs, measurements and
    gradients are added up, so that all of them end every step with the same.
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
        mismatch: MismatchConfig | None = None,
        accelerator: Accelerator | None = None,
    ) -> None:
        from transformers import get_scheduler

        self.policy = policy
        self.config = config
        self.reward = reward or RewardConfig()
        self.mismatch = mismatch or MismatchConfig()
        self.max_length = max_length
        self.num_optimizer_steps = 0
        self.accelerator = accelerator or make_accelerator(LaunchConfig(), config)
        self.passes = Passes(
            self.accelerator,
            pad_id=pad_id,
            max_tokens=config.max_tokens_per_micro_batch,
            packing=config.packing,
            padding_side=padding_side,
        )
        if config.packing:
            check_packing(language_model)
        prepare_for_training(language_model, config)
        self.language_model = language_model
        module = ResponseLogProbs(language_model, temperature)
        self.reference: ResponseLogProbs | None = None
        if (config.kl_coef > 0 or self.reward.kl_coef > 0) and not has_adapter(language_model):
            self.reference = copy.deepcopy(module).requires_grad_(False).to(self.accelerator.device)
        self.optimization = make_optimization(self.accelerator, module, config)
        self.model = self.optimization.model
        self.scheduler = get_scheduler(
            "constant_with_warmup" if config.schedule == "constant" else config.schedule,
            self.optimization.optimizer,
            num_warmup_steps=config.warmup_updates,
            num_training_steps=num_updates,
        )

    @property
    def has_reference(self) -> bool:
        """Whether a KL to the starting model is wanted."""
        return self.config.kl_coef > 0 or self.reward.kl_coef > 0

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight as it is now, by name, whole; every process must ask for all of them."""
        return named_weights(self.language_model)

    def save(self, folder: Path) -> None:
        """Write the trained parameters, the optimizer's states and the policy's."""
        folder.mkdir(parents=True, exist_ok=True)
        self.optimization.save(folder)
        if self.accelerator.is_main_process:
            (folder / "policy.json").write_text(self.policy.model_dump_json(), encoding="utf-8")

    def load(self, folder: Path, num_optimizer_steps: int, scheduler: dict[str, Any]) -> None:
        """Read them back, and go on with the schedule from there."""
        self.optimization.load(folder)
        self.policy = type(self.policy).model_validate_json((folder / "policy.json").read_text(encoding="utf-8"))
        self.scheduler.load_state_dict(scheduler)
        for group, lr in zip(self.optimization.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True):
            group["lr"] = lr  # the scheduler sets it only with its next step
        self.num_optimizer_steps = num_optimizer_steps

    def update(
        self, experience: Experience, seed: int, before_update: Callable[[int], None] | None = None
    ) -> tuple[Experience, list[Update]]:
        """Take every optimizer step of one rollout batch.

        Args:
            experience: the graded rollouts, the same in every process.
            seed: decides which responses share a minibatch, and what rules draw that draw at random.
            before_update: told the number of each update, from 0, before its first forward pass.

        Returns:
            The experience with its ``old_log_probs`` filled in, and the advantages that follow from them where the reward
            has a KL; and the steps in order.
        """
        experience = with_mismatch_weights(self.with_old_log_probs(experience), self.mismatch)
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
        old, _ = self.passes.log_probs(self.model, experience, rows)
        if not self.has_reference:
            return replace(experience, old_log_probs=old)
        if self.reference is None:
            with without_adapter(self.language_model):
                ref, _ = self.passes.log_probs(self.model, experience, rows)
        else:
            with self.accelerator.autocast():
                ref, _ = self.passes.log_probs(self.reference, experience, rows)
        return replace(experience, old_log_probs=old, ref_log_probs=ref)

    def step(self, experience: Experience, rows: Tensor, seed: int = 0) -> Update:
        """One optimizer step on some rows of the experience."""
        lr = float(self.scheduler.get_last_lr()[0])
        learns = self.config.kl_coef > 0 or bool((experience.advantages[rows] != 0).any())
        log_probs, table, objective = self.accumulate(experience, rows, seed, learns=learns)
        limit = self.config.max_grad_norm
        applied = self.optimization.apply(limit) if learns else Applied(grad_norm=0.0, stepped=False)
        if applied.stepped:
            self.scheduler.step()
            self.num_optimizer_steps += 1
        clipped = limit is not None and applied.grad_norm > limit
        return Update(rows, log_probs, table, objective, applied.grad_norm, clipped, not applied.stepped, lr)

    def accumulate(
        self, experience: Experience, rows: Tensor, seed: int = 0, *, learns: bool = True
    ) -> tuple[Tensor, ResponseTable, float]:
        """Add up the gradient of one step's loss, micro-batch by micro-batch.

        Args:
            experience: with its old log-probs.
            rows: ``(R,)`` of the experience, of all processes.
            seed: of rules that draw at random.
            learns: False to measure only.

        Returns:
            The rows' log-probs ``(R, T)``, their measurements, and the objective J, over all processes.
        """
        counts = _counts(experience, rows)
        pieces = self.passes.micro_batches(experience, rows)
        g = self._whole_step_gradient(experience, rows, counts, seed) if self.policy.scope == "batch" else None
        log_probs = torch.zeros(experience.response_mask.shape)
        measured: list[tuple[ResponseTable, float]] = []
        for index, piece in enumerate(pieces):
            is_last = index == len(pieces) - 1
            with self.optimization.micro_batch(is_last), torch.set_grad_enabled(learns):
                current, entropy = self.passes.forward(self.model, experience, piece.rows)
                if piece.is_idle:
                    upstream = torch.zeros_like(current)
                elif g is None:
                    upstream, table, share = self._judge(experience, piece.rows, current, counts, entropy, seed)
                    measured.append((table, share))
                else:
                    upstream = g.gradient[piece.rows, : current.shape[1]].to(current.device)
                if learns:
                    self.optimization.backward(-(upstream * current).sum())
            if not piece.is_idle:
                log_probs[piece.rows, : current.shape[1]] = current.detach().float().cpu()
        log_probs = self.passes.sum(log_probs)[rows]
        if g is not None:
            return log_probs, g.table, g.objective
        measured = gather(self.accelerator, measured)
        return log_probs, ResponseTable.concat([table for table, _ in measured]), sum(share for _, share in measured)

    def _judge(
        self, experience: Experience, rows: Tensor, log_probs: Tensor, counts: StepCounts, entropy: Tensor, seed: int
    ) -> tuple[Tensor, ResponseTable, float]:
        """The policy on these rows: the loss's g = dJ/dlog_probs ``(R, T)``, their measurements, their share of J."""
        inputs = experience.clip_inputs(rows, log_probs.detach(), seed)
        with torch.enable_grad():
            weights = experience.mismatch_weights
            if weights is not None:
                weights = weights[rows, : log_probs.shape[1]].to(log_probs.device)
            judged = judgement(self.policy, inputs, counts, self.max_length, weights)
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
        with torch.enable_grad():
            kl = kl_estimate(leaf, ref_log_probs, self.config.kl_estimator)
            total = reduce_objective(kl, inputs.response_mask, self.policy.reduction, counts, self.max_length)
            (gradient,) = torch.autograd.grad(total, leaf)
        return kl.detach(), gradient

    def _whole_step_gradient(self, experience: Experience, rows: Tensor, counts: StepCounts, seed: int) -> WholeStep:
        """The g of a rule that looks at the whole step: all log-probs first, without gradient, then the policy once."""
        log_probs, entropy = self.passes.log_probs(self.model, experience, rows)
        device = self.accelerator.device
        g, table, objective = self._judge(experience, rows, log_probs[rows].to(device), counts, entropy[rows].to(device), seed)
        gradient = torch.zeros(experience.response_mask.shape)
        gradient[rows] = g.cpu()
        return WholeStep(gradient, table, objective)


def _counts(experience: Experience, rows: Tensor) -> StepCounts:
    """The step's denominators, fixed before its first backward pass, over all micro-batches and processes."""
    lengths = experience.lengths[rows]
    return StepCounts(num_responses=int((lengths > 0).sum()), num_tokens=int(lengths.sum()))
