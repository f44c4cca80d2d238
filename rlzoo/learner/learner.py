"""The learner, which turns a batch of graded responses into optimizer steps."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from torch import Tensor

from rlzoo.config.redaction import redact_settings, with_secrets_of
from rlzoo.config.sections import (
    LaunchConfig,
    LearnerConfig,
    RewardConfig,
    minibatches_by_prompts,
    needs_reference,
)
from rlzoo.core import ops
from rlzoo.core.advantages import AdvantageEstimator, AdvantageInputs
from rlzoo.core.corrections import Correction, CorrectionInputs
from rlzoo.core.errors import RunError, UserError
from rlzoo.core.fairness import bin_edges
from rlzoo.core.policy import ClipPolicy
from rlzoo.core.reductions import kl_estimate
from rlzoo.core.zoo import load_zoo
from rlzoo.learner.adapter_check import check_adapter
from rlzoo.learner.batch import Batch, ScoredBatch
from rlzoo.learner.judge import updated
from rlzoo.learner.log_probs import ResponseLogProbs
from rlzoo.learner.micro_batches import MicroBatch, MicroBatches, PaddingSide
from rlzoo.learner.minibatch import Measured, Minibatch, learns_without_advantages
from rlzoo.learner.optimization import freeze_unused, make_optimization, make_scheduler, named_weights
from rlzoo.learner.row_check import check_rows
from rlzoo.learner.shaping import overlong_penalty, without_truncated
from rlzoo.models.adapters import has_adapter, prepare_for_training, without_adapter
from rlzoo.models.probe import Probe
from rlzoo.models.processes import make_accelerator
from rlzoo.support.reading import read_text

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Update(Measured):
    """One optimizer step: its inputs and its outcome."""

    grad_norm: float  # before clipping
    grad_clipped: bool
    skipped: bool  # no step was taken: all advantages were 0, or the gradient was not finite
    nonfinite: bool  # the gradient was not finite
    lr: float


class Learner:
    """Owns the optimizer and the current state of the rule.

    The rule is differentiated with respect to the log-probs only, g = dJ/dlog_probs, and ``sum(g * log_probs)`` is
    back-propagated through the model. This is exact for every rule, because a rule sees the model only through log_probs.

    With several processes, each process holds the whole batch and computes its share of the rows. Log-probs, measurements
    and gradients are summed across processes, so that all processes end a step with the same values.
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
        padding_side: PaddingSide = "right",
        reward: RewardConfig | None = None,
        estimator: AdvantageEstimator | None = None,
        correction: Correction | None = None,
        accelerator: Accelerator | None = None,
        launch: LaunchConfig | None = None,
        probe: Probe | None = None,
    ) -> None:
        self.policy = policy
        self.config = config
        self.reward = reward or RewardConfig()
        self.estimator = estimator or load_zoo().advantages.build("clip.advantage", policy.advantage)
        self.correction = correction
        self.max_length = max_length
        self.num_updates = num_updates
        self.num_optimizer_steps = 0
        self.num_nonfinite = 0  # number of consecutive updates whose gradient was not finite
        launch = launch or LaunchConfig()
        self.accelerator = accelerator or make_accelerator(launch, config)
        self.micro_batches = MicroBatches(self.accelerator, language_model, config, pad_id=pad_id, padding_side=padding_side)
        probe = probe or Probe.of(language_model)
        before = dict(named_weights(language_model)) if config.lora.rank else {}
        prepare_for_training(language_model, config)
        if before:
            check_adapter(language_model, before)
        self.language_model = language_model
        module = ResponseLogProbs(language_model, temperature, entropy_gradient=config.entropy_coef > 0)
        self._module = module
        self.reference: ResponseLogProbs | None = None
        if self.has_reference and not has_adapter(language_model):
            self.reference = copy.deepcopy(module).requires_grad_(False).to(self.accelerator.device)
        freeze_unused(self.accelerator, module)
        self.optimization = make_optimization(self.accelerator, module, config, fsdp=launch.fsdp)
        self.model = self.optimization.model
        self.scheduler = make_scheduler(self.optimization.optimizer, config, num_updates)
        check_rows(self.micro_batches, self.model, module, config, probe)

    @property
    def has_reference(self) -> bool:
        """Whether the run needs log-probs from the starting model."""
        return needs_reference(self.config, self.reward, self.policy)

    @property
    def progress(self) -> float:
        """Fraction of the run's updates that precede the next update, in [0, 1)."""
        return float(self.scheduler.last_epoch) / max(self.num_updates, 1)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every current weight with its name, unsharded; all processes must iterate over all weights."""
        return named_weights(self.language_model, self.optimization.rounded_to)

    def save(self, folder: Path) -> None:
        """Write the trained parameters and the state of the optimizer and the policy."""
        folder.mkdir(parents=True, exist_ok=True)
        self.optimization.save(folder)
        if self.accelerator.is_main_process:
            settings = redact_settings(self.policy.model_dump(mode="json"))
            (folder / "policy.json").write_text(json.dumps(settings), encoding="utf-8")

    def load(self, folder: Path, num_optimizer_steps: int, num_updates: int) -> None:
        """Restore what `save` wrote, and advance the learning-rate schedule.

        Args:
            folder: folder that `save` wrote.
            num_optimizer_steps: optimizer steps taken before `save`.
            num_updates: updates before `save`, including skipped updates.

        Raises:
            UserError: the files do not belong to this run.
        """
        try:
            self.optimization.load(folder, num_optimizer_steps)
            if self.policy.is_adaptive:  # its state is in its settings
                written = json.loads(read_text(folder / "policy.json"))
                settings = with_secrets_of(self.policy.model_dump(mode="json"), written)
                self.policy = type(self.policy).model_validate_json(json.dumps(settings))
        except UserError:
            raise
        except (OSError, ValueError, LookupError, RuntimeError, SafetensorError) as error:
            raise UserError(f"--resume: {str(folder)!r} does not belong to this run: {error}") from error
        self.advance_schedule(num_updates - self.scheduler.last_epoch)
        for group, lr in zip(self.optimization.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True):
            group["lr"] = lr  # DeepSpeed has restored the saved learning rate
        self.num_optimizer_steps = num_optimizer_steps

    def score(self, batch: Batch, seed: int = 0) -> ScoredBatch:
        """Compute all of the rule's inputs except the current model's log-probs.

        Every row is scored in the micro-batch in which it will be trained. In another one, rounding differs, and in bfloat16
        ratios would differ from 1 although the weights are the same.

        Args:
            batch: batch, identical on every process.
            seed: seed that determines the split into minibatches, and the draws of rules that use random numbers. Rows of
                the first minibatch are not scored; see `ScoredBatch`.
        """
        rewards = batch.rewards - overlong_penalty(batch.lengths, self.max_length, self.reward)
        batch = replace(batch, rewards=rewards)
        kl_coef, needs = self.reward.kl_coef, self.estimator.needs
        advantages = None if self._scores_before_advantages else self._advantages(batch)
        unscored = torch.zeros(len(batch), dtype=torch.bool)
        minibatches = self.minibatches(batch, seed)[: self.config.num_minibatches]  # the first epoch has every row once
        if not self.has_reference and advantages is not None and not self._learns_from(advantages):
            unscored[:] = True  # the old log-probs of these rows are never read
        elif advantages is not None and self.correction is None:
            unscored[minibatches[0]] = batch.graded[minibatches[0]]
        learning, whole, pieces = self._learning(batch, advantages), [], []
        for rows in minibatches:
            cut = self._cut(batch, rows, learning)
            whole += cut
            pieces += self.micro_batches.of(batch, rows[~unscored[rows]]) if unscored[rows].any() else cut
        old_log_probs, old_entropy = self.micro_batches.log_probs(self.model, batch, pieces)
        ref_log_probs = self.reference_log_probs(batch, whole) if self.has_reference else None
        if advantages is None:
            given: dict[str, Tensor] = {}
            if kl_coef:
                assert ref_log_probs is not None, "has_reference"
                given["token_rewards"] = -kl_coef * kl_estimate(old_log_probs, ref_log_probs, "k1")
            if "old_log_probs" in needs:
                given["old_log_probs"] = old_log_probs
            if "collision_probs" in needs:
                given["collision_probs"] = self.collision_probs(batch)
            advantages = self._advantages(batch, **given)
        weights = None
        if self.correction is not None:
            weights = self.correction(CorrectionInputs(old_log_probs, batch.rollout_log_probs, batch.response_mask, advantages))
        return ScoredBatch.of(
            batch,
            old_log_probs=old_log_probs,
            advantages=advantages,
            ref_log_probs=ref_log_probs,
            old_entropy=old_entropy if "old_entropy" in self.policy.needs else None,
            weights=weights,
            unscored=unscored,
            seed=seed,
        )

    def _advantages(self, batch: Batch, **given: Tensor) -> Tensor:
        """Estimate the advantages, ``(B, 1)``, or ``(B, T)`` with per-token credit; 0 for filtered responses.

        Responses without a grade are in no baseline, and have advantage 0, as do the others of a group that is then too small.

        Args:
            batch: batch with shaped rewards.
            given: optional fields of `AdvantageInputs`, ``(B, T)`` each.
        """
        rewards = batch.rewards[:, None]
        if batch.state_ids is not None:
            given["state_ids"] = batch.state_ids
        if batch.turn_rewards is not None and self.estimator.takes_token_rewards and self.policy.scope != "sequence":
            paid = batch.turn_rewards
            rewards = rewards - paid.sum(-1, keepdim=True)
            given["token_rewards"] = paid + given["token_rewards"] if "token_rewards" in given else paid
        inputs = AdvantageInputs(rewards, batch.group_ids[:, None], batch.response_mask, batch.turn_ids, **given)
        number = ops.group_sum(batch.graded.float()[:, None], inputs.group_ids)[:, 0]
        rows = (batch.graded & ((number >= self.estimator.min_group_size) | self.estimator.takes_one)).nonzero()[:, 0]
        if len(rows) == 0:
            return torch.zeros_like(rewards)
        estimated = self.estimator(inputs if len(rows) == len(batch) else inputs.select(rows))
        advantages = torch.zeros(len(batch), estimated.shape[1]).index_copy(0, rows, estimated)
        return without_truncated(advantages, batch.finished, self.reward)

    def log_probs(self, batch: Batch) -> Tensor:
        """Compute the model's log-probs of all responses, ``(B, T)``."""
        return self.log_probs_and_entropy(batch)[0]

    def log_probs_and_entropy(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the model's log-probs and entropies of all responses, ``(B, T)`` each."""
        return self.micro_batches.log_probs(self.model, batch, self.micro_batches.of(batch, torch.arange(len(batch))))

    def collision_probs(self, batch: Batch) -> Tensor:
        """In a separate pass, compute collision probabilities ``(B, T)``: sums of squared probabilities over the vocabulary."""
        self._module.statistic = "collision"
        try:
            return self.log_probs_and_entropy(batch)[1]
        finally:
            self._module.statistic = "entropy"

    def reference_log_probs(self, batch: Batch, pieces: Sequence[MicroBatch] | None = None) -> Tensor:
        """Compute the log-probs from the starting model, ``(B, T)``, in the given micro-batches."""
        pieces = self.micro_batches.of(batch, torch.arange(len(batch))) if pieces is None else pieces
        if self.reference is None:
            with without_adapter(self.language_model):
                return self.micro_batches.log_probs(self.model, batch, pieces)[0]
        with self.accelerator.autocast():
            return self.micro_batches.log_probs(self.reference, batch, pieces)[0]

    def minibatches(self, batch: Batch, seed: int) -> list[Tensor]:
        """Draw the minibatches at random: one tensor of rows per optimizer step, epoch by epoch.

        Later epochs have the same minibatches in another order, so that a row is always in the same micro-batch. With
        ``learner.minibatch_by=prompts``, whole groups are drawn instead of individual rows.
        """
        rng = torch.Generator().manual_seed(seed)
        by_prompts = minibatches_by_prompts(self.config, self.policy)
        group = torch.unique(batch.group_ids, return_inverse=True)[1] if by_prompts else torch.arange(len(batch))
        number, order = self.config.num_minibatches, torch.randperm(int(group.max()) + 1, generator=rng)
        drawn = list(order.tensor_split(number))
        if by_prompts:
            drawn = [torch.cat([(group == index).nonzero()[:, 0] for index in share]) for share in drawn]
        later = [torch.randperm(number, generator=rng) for _ in range(1, self.config.num_epochs)]
        return drawn + [drawn[index] for order in later for index in order]

    def update(
        self, batch: ScoredBatch, before_update: Callable[[int, ScoredBatch], None] | None = None
    ) -> tuple[ScoredBatch, list[Update]]:
        """Take all optimizer steps on one batch.

        Args:
            batch: batch, identical on every process.
            before_update: called just before each update changes the weights, with the index of the update, from 0, and the
                batch with all old log-probs.

        Returns:
            The batch with all old log-probs filled in, and the updates in order: an empty list if no response can have a
            gradient.
        """
        minibatches = self.minibatches(batch, batch.seed)
        if not self._learns_from(batch.advantages):
            self.advance_schedule(len(minibatches))
            return batch, []
        updates: list[Update] = []
        for index, rows in enumerate(minibatches):
            if not batch.graded[rows].any():  # no grades, or fewer responses than minibatches
                self.advance_schedule(1)
                continue
            progress = self.progress
            measured = self.accumulate(batch, rows, batch.seed + index)
            if batch.unscored.any():
                batch = batch.with_old_log_probs(rows, measured.log_probs, measured.entropy)
            if before_update is not None:
                before_update(index, batch)
            update = self.apply(measured)
            updates.append(update)
            if self.policy.is_adaptive and not update.nonfinite:
                stats = update.table.clip_stats(bin_edges(batch.lengths), progress)
                self.policy = updated(self.policy, stats)
        return batch, updates

    def accumulate(self, batch: ScoredBatch, rows: Tensor, seed: int = 0) -> Measured:
        """Accumulate the gradient of one minibatch's loss over its micro-batches.

        Rows with advantage 0 get only a forward pass, unless the rule declares that it learns from them or the loss has a
        KL term or an entropy bonus. Rows without a grade get only a forward pass and count in the denominators. A rule of
        scope "batch" is evaluated before the first backward pass.

        Args:
            batch: scored batch.
            rows: ``(R,)`` rows of the minibatch, across all processes.
            seed: seed for rules that draw random numbers.
        """
        minibatch = Minibatch(batch, rows, self.policy, self.config, self.max_length, seed, self.progress)
        learning = self._learning(batch, batch.advantages)
        pieces = self._cut(batch, rows, learning)
        if self.policy.scope == "batch":
            log_probs, entropy = self.micro_batches.log_probs(self.model, batch, pieces)
            acting = minibatch.judge_whole(log_probs.to(self.accelerator.device), entropy.to(self.accelerator.device))
            pieces = self.micro_batches.of(batch, acting, learns=True) if learning[rows].any() else []
        for index, piece in enumerate(pieces):
            with self.optimization.micro_batch(is_last=index == len(pieces) - 1), torch.set_grad_enabled(piece.learns):
                log_probs, entropy = self.micro_batches.forward(self.model, batch, piece.rows)
                gradient = minibatch.gradient(piece, log_probs, entropy)
                if piece.learns:
                    objective = (gradient * log_probs).sum()
                    if self.config.entropy_coef > 0:
                        objective = objective + minibatch.entropy_bonus(piece, entropy)
                    self.optimization.backward(-objective)  # the loss is the negated objective
        return minibatch.measured(self.micro_batches)

    def apply(self, measured: Measured) -> Update:
        """Take an optimizer step with the accumulated gradient, and advance the learning-rate schedule."""
        lr = float(self.scheduler.get_last_lr()[0])
        learns, limit, norm, stepped = measured.learns, self.config.max_grad_norm, 0.0, False
        if learns:
            norm, stepped = self.optimization.apply(limit)
        else:
            self.optimization.forget()  # with a zero gradient, AdamW's momentum would still move the weights
        self.advance_schedule(1)  # whether or not the step was taken
        self.num_optimizer_steps += stepped
        if learns:
            self.num_nonfinite = 0 if stepped else self.num_nonfinite + 1
            if self.num_nonfinite >= self.config.max_nonfinite:
                raise RunError(
                    f"the gradient was not finite in {self.num_nonfinite} consecutive updates (learner.max_nonfinite); "
                    "lower learner.lr, or check for infinite rewards and for overflow in the model's dtype"
                )
        return Update(
            **{each.name: getattr(measured, each.name) for each in fields(Measured)},
            grad_norm=norm,
            grad_clipped=limit is not None and norm > limit,
            skipped=not stepped,
            nonfinite=learns and not stepped,
            lr=lr,
        )

    def advance_schedule(self, num_updates: int) -> None:
        """Advance the learning-rate schedule, which also counts skipped updates."""
        with warnings.catch_warnings():
            # torch warns if the optimizer has not taken a step yet
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            for _ in range(num_updates):
                self.scheduler.step()

    @property
    def _scores_before_advantages(self) -> bool:
        """Whether the advantages depend on the old log-probs."""
        return bool(self.reward.kl_coef or self.estimator.needs & {"old_log_probs", "collision_probs"})

    def _learning(self, batch: Batch, advantages: Tensor | None) -> Tensor:
        """Return the rows that can have a gradient, ``(B,)`` bool; the result is the same before and after the scoring pass."""
        learns = self._scores_before_advantages or learns_without_advantages(self.config, self.policy)
        return batch.graded if learns or advantages is None else (advantages != 0).any(dim=1)

    def _cut(self, batch: Batch, rows: Tensor, learning: Tensor) -> list[MicroBatch]:
        """Split a minibatch into this process's micro-batches, in the same way for scoring and for training; see `score`."""
        if self.policy.scope == "batch":  # the rule sees log-probs from one pass over all rows
            return self.micro_batches.of(batch, rows)
        acting, silent = rows[learning[rows]], rows[~learning[rows]]
        return self.micro_batches.of(batch, silent) + self.micro_batches.of(batch, acting, learns=True)

    def _learns_from(self, advantages: Tensor) -> bool:
        """Return whether any response can have a gradient."""
        return learns_without_advantages(self.config, self.policy) or bool((advantages != 0).any())
