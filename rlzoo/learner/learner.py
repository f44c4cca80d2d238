"""The learner, which turns a batch of graded responses into optimizer steps."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from rlzoo.core.reductions import StepCounts, kl_estimate, reduce_objective
from rlzoo.core.types import NEEDS, ClipInputs
from rlzoo.core.zoo import load_zoo
from rlzoo.learner.adapter_check import check_adapter
from rlzoo.learner.batch import AdvantageBatch, Batch, ScoredBatch
from rlzoo.learner.critic import Critic
from rlzoo.learner.judge import Judgement, judgement, updated
from rlzoo.learner.log_probs import ResponseLogProbs
from rlzoo.learner.micro_batches import MicroBatch, MicroBatches
from rlzoo.learner.minibatch import Minibatch, measure
from rlzoo.learner.optimization import freeze_unused, make_optimization, make_scheduler, named_weights
from rlzoo.learner.row_check import check_rows
from rlzoo.learner.shaping import overlong_penalty, without_truncated
from rlzoo.learner.teacher import Teacher
from rlzoo.models.adapters import has_adapter, prepare_for_training, without_adapter
from rlzoo.models.probe import Probe
from rlzoo.models.processes import gather, make_accelerator
from rlzoo.support.reading import read_text

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

TENSORS = frozenset(NEEDS) - {"max_length", "progress"}
"""Optional inputs of a rule that are tensors."""


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer step."""

    minibatch: Minibatch
    grad_norm: float  # gradient norm before clipping
    grad_clipped: bool
    skipped: bool  # whether no step was taken, because all advantages were 0 or the gradient was not finite
    nonfinite: bool  # whether the gradient was not finite
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
        reward: RewardConfig | None = None,
        estimator: AdvantageEstimator | None = None,
        correction: Correction | None = None,
        accelerator: Accelerator | None = None,
        launch: LaunchConfig | None = None,
        probe: Probe | None = None,
        teacher: Teacher | None = None,
        critic: Critic | None = None,
    ) -> None:
        self.policy = policy
        self.config = config
        self.reward = reward or RewardConfig()
        self.estimator = estimator or load_zoo().advantages.build("clip.advantage", policy.advantage)
        self.correction = correction
        self._scores_before_advantages = bool(self.reward.kl_coef or self.estimator.needs & {"old_log_probs", "ref_log_probs"})
        self._is_regularized = config.kl_coef > 0 or config.entropy_coef > 0
        self._learns_without_advantages = policy.learns_without_advantages or self._is_regularized
        self.max_length = max_length
        self.num_updates = num_updates
        self.num_optimizer_steps = 0
        self.num_nonfinite = 0  # number of consecutive updates whose gradient was not finite
        launch = launch or LaunchConfig()
        self.accelerator = accelerator or make_accelerator(launch, config)
        self.micro_batches = MicroBatches(self.accelerator, language_model, config, pad_id=pad_id)
        probe = probe or Probe.of(language_model)
        before = dict(named_weights(language_model)) if config.lora.rank else {}
        prepare_for_training(language_model, config)
        if before:
            check_adapter(language_model, before)
        self.language_model = language_model
        module = ResponseLogProbs(language_model, temperature, entropy_gradient=config.entropy_coef > 0)
        self._module = module
        self.teacher, self.critic = teacher, critic
        self.reference: ResponseLogProbs | None = None
        if self.has_reference and teacher is None and not has_adapter(language_model):
            self.reference = copy.deepcopy(module).requires_grad_(False).to(self.accelerator.device)
        freeze_unused(self.accelerator, module)
        self.optimization = make_optimization(self.accelerator, module, config, fsdp=launch.fsdp)
        self.model = self.optimization.model
        self.scheduler = make_scheduler(self.optimization.optimizer, config, num_updates)
        check_rows(self.micro_batches, self.model, module, config, probe)

    @property
    def has_reference(self) -> bool:
        """Whether the run needs log-probs from the reference model, which is the teacher or the starting model."""
        return needs_reference(self.config, self.reward, self.policy, self.estimator)

    @property
    def progress(self) -> float:
        """Fraction of the run's updates that precede the next update, in [0, 1)."""
        return float(self.scheduler.last_epoch) / max(self.num_updates, 1)

    @property
    def position(self) -> tuple[int, int]:
        """Numbers of model updates (including skipped ones) and critic updates. If neither grows, no weights have changed."""
        return self.scheduler.last_epoch, self.critic.num_updates if self.critic is not None else 0

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every current weight, unsharded, with its name. All processes must iterate over all weights."""
        return named_weights(self.language_model, self.optimization.rounded_to)

    def save(self, folder: Path) -> None:
        """Write the trained parameters and the state of the optimizer and the policy."""
        folder.mkdir(parents=True, exist_ok=True)
        self.optimization.save(folder)
        if self.critic is not None:
            self.critic.save(folder)
        if self.accelerator.is_main_process:
            settings = redact_settings(self.policy.model_dump(mode="json"))
            (folder / "policy.json").write_text(json.dumps(settings), encoding="utf-8")

    def load(self, folder: Path, num_optimizer_steps: int, num_updates: int) -> None:
        """Restore the state that `save` wrote, and advance the learning-rate schedule.

        Args:
            folder: folder that `save` wrote.
            num_optimizer_steps: optimizer steps taken before `save`.
            num_updates: updates before `save`, including skipped updates.

        Raises:
            UserError: the files do not belong to this run.
        """
        try:
            self.optimization.load(folder)
            if self.critic is not None:
                self.critic.load(folder)
            if self.policy.is_adaptive:  # an adaptive rule keeps its state in its settings
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

    def score(self, batch: Batch, seed: int = 0) -> AdvantageBatch:
        """Compute the advantages and the reference log-probs.

        If the advantages or a mismatch correction depend on the old log-probs, compute these too and return a `ScoredBatch`.
        Otherwise, `update` computes them without a separate pass for the rows of the first minibatch.

        Every row is scored in the micro-batch in which it will be trained. In another micro-batch, rounding would differ. In
        bfloat16, ratios would then differ from 1 even with the same weights.

        Args:
            batch: batch, identical on every process.
            seed: seed that determines the split into minibatches and the draws of rules that use random numbers.
        """
        batch = replace(batch, rewards=batch.rewards - overlong_penalty(batch.lengths, self.max_length, self.reward))
        critic = {} if self.critic is None else self.critic.score(batch)  # the values
        estimates = {} if self._scores_before_advantages else self._estimates(batch, **critic)
        advantages = estimates.get("advantages")
        minibatches = self.minibatches(batch, seed)[: self.config.num_minibatches]  # the first epoch has every row once
        minibatches += self._ignored(batch)
        micro_batches = [micro_batch for rows in minibatches for micro_batch in self._cut(batch, rows, advantages)]
        ref_log_probs = self.reference_log_probs(batch, micro_batches) if self.has_reference else None
        if advantages is not None and (self.correction is None or not self._learns_from(advantages)):
            return AdvantageBatch.of(batch, **estimates, **critic, seed=seed, ref_log_probs=ref_log_probs)
        old_log_probs, old_entropy = self.micro_batches.log_probs(self.model, batch, micro_batches)
        if advantages is None:
            signals: dict[str, Tensor] = dict(critic)
            if self.reward.kl_coef:
                assert ref_log_probs is not None, "has_reference"
                signals["token_rewards"] = -self.reward.kl_coef * kl_estimate(old_log_probs, ref_log_probs, "k1")
            scores = {"old_log_probs": old_log_probs, "ref_log_probs": ref_log_probs}
            signals |= {name: values for name, values in scores.items() if name in self.estimator.needs and values is not None}
            estimates = self._estimates(batch, **signals)
            advantages = estimates["advantages"]
        weights = None
        if self.correction is not None:
            weights = self.correction(CorrectionInputs(old_log_probs, batch.rollout_log_probs, batch.response_mask, advantages))
        return ScoredBatch.of(
            batch,
            **estimates,
            **critic,
            seed=seed,
            ref_log_probs=ref_log_probs,
            old_log_probs=old_log_probs,
            old_entropy=old_entropy if "old_entropy" in self.policy.needs else None,
            correction_weights=weights,
        )

    def _estimates(self, batch: Batch, **signals: Any) -> dict[str, Tensor]:
        """Estimate the ``advantages``, ``(B, 1)`` (with per-token credit, ``(B, T)``), and the ``value_targets``, ``(B, T)``.

        Advantages of filtered responses are 0. Responses without a grade are left out of baselines and have advantage 0. If
        this makes a group too small, its other responses have advantage 0 too.

        Args:
            batch: batch with shaped rewards.
            signals: optional fields of `AdvantageInputs`, ``(B, T)`` each.
        """
        rewards = batch.rewards[:, None]
        if batch.state_ids is not None:
            signals["state_ids"] = batch.state_ids
        if batch.turn_rewards is not None and self.estimator.takes_token_rewards and self.policy.scope != "sequence":
            paid = batch.turn_rewards
            rewards = rewards - paid.sum(-1, keepdim=True)
            signals["token_rewards"] = paid + signals["token_rewards"] if "token_rewards" in signals else paid
        if "finished" in self.estimator.needs:
            signals["finished"] = batch.finished[:, None]
        if "reward_parts" in self.estimator.needs and batch.reward_parts is not None:
            signals["reward_weights"] = self.reward.weights
            signals["reward_parts"] = {name: values[:, None] for name, values in batch.reward_parts.items()}
        inputs = AdvantageInputs(rewards, batch.group_ids[:, None], batch.response_mask, batch.turn_ids, **signals)
        number = ops.group_sum(batch.graded.float()[:, None], inputs.group_ids)[:, 0]
        rows = (batch.graded & ((number >= self.estimator.min_group_size) | self.estimator.takes_one)).nonzero()[:, 0]
        if len(rows) == 0:
            return {"advantages": torch.zeros_like(rewards)}
        inputs = inputs if len(rows) == len(batch) else inputs.select(rows)
        estimated = {"advantages": self.estimator(inputs)}
        if self.critic is not None:
            estimated["value_targets"] = self.estimator.value_targets(inputs)
        for name, values in estimated.items():
            estimated[name] = torch.zeros(len(batch), values.shape[1]).index_copy(0, rows, values)
        return estimated | {"advantages": without_truncated(estimated["advantages"], batch.finished, self.reward)}

    def log_probs(self, batch: Batch) -> Tensor:
        """Compute the model's log-probs of all responses, ``(B, T)``."""
        return self.micro_batches.log_probs(self.model, batch)[0]

    def reference_log_probs(self, batch: Batch, micro_batches: Sequence[MicroBatch] | None = None) -> Tensor:
        """Compute the log-probs ``(B, T)`` of the teacher, or those of the starting model in the given micro-batches."""
        if self.teacher is not None:
            return self.teacher.log_probs(batch)
        if self.reference is None:
            with without_adapter(self.language_model):
                return self.micro_batches.log_probs(self.model, batch, micro_batches)[0]
        with self.accelerator.autocast():
            return self.micro_batches.log_probs(self.reference, batch, micro_batches)[0]

    def minibatches(self, batch: Batch, seed: int) -> list[Tensor]:
        """Draw the minibatches at random. The result has one tensor of rows per optimizer step, epoch by epoch.

        Later epochs have the same minibatches in another order, so that a row is always in the same micro-batch. With
        ``learner.minibatch_by=prompts``, whole groups are drawn instead of individual rows. With
        ``learner.ignore_equal_groups``, the rows of groups with equal rewards are left out of all minibatches.
        """
        rng = torch.Generator().manual_seed(seed)
        by_prompts, rows = minibatches_by_prompts(self.config, self.policy), torch.arange(len(batch))
        for ignored in self._ignored(batch):
            rows = rows[~torch.isin(rows, ignored)]
        group = torch.unique(batch.group_ids[rows], return_inverse=True)[1] if by_prompts else None
        drawn_from = len(rows) if group is None else max(group.tolist(), default=-1) + 1
        number, order = self.config.num_minibatches, torch.randperm(drawn_from, generator=rng)
        drawn = list(order.tensor_split(number))
        if group is not None:
            drawn = [torch.cat([order[:0], *((group == index).nonzero()[:, 0] for index in share)]) for share in drawn]
        if self.config.ignore_equal_groups:
            drawn = [rows[places] for places in drawn]
        later = [torch.randperm(number, generator=rng) for _ in range(1, self.config.num_epochs)]
        return drawn + [drawn[index] for order in later for index in order]

    def update(
        self, batch: AdvantageBatch, before_update: Callable[[ScoredBatch], None] | None = None
    ) -> tuple[AdvantageBatch, list[Update]]:
        """Take all optimizer steps on one batch.

        Args:
            batch: batch, identical on every process.
            before_update: called with the batch and its old log-probs, just before each update changes the weights.

        Returns:
            The batch with its old log-probs, and the updates in order. If no response can have a gradient, or only the critic
            learns, there are no updates and no old log-probs.
        """
        minibatches, rests = self.minibatches(batch, batch.seed), not self._learns_from(batch.advantages)
        if self.critic is not None:
            self.critic.updates.clear()
            rests = rests or batch.step <= self.critic.config.warmup_steps
        updates: list[Update] = []
        for index, rows in enumerate(minibatches):
            if self.critic is not None:
                self.critic.update(batch, rows, float(self.scheduler.get_last_lr()[0]) / self.config.lr)
            if rests or not batch.graded[rows].any():  # there are no grades, or fewer responses than minibatches
                self.advance_schedule(1)
                continue
            progress = self.progress
            minibatch = self.accumulate(batch, rows, batch.seed + index)
            if not isinstance(batch, ScoredBatch):
                others = [other for other in minibatches[: self.config.num_minibatches] if other is not rows]
                batch = self._with_old_log_probs(batch, minibatch, others + self._ignored(batch))
            if before_update is not None:
                before_update(batch)
            update = self.apply(minibatch)
            updates.append(update)
            if self.policy.is_adaptive and not update.nonfinite:
                stats = minibatch.table.clip_stats(bin_edges(batch.lengths), progress)
                self.policy = updated(self.policy, stats)
        return batch, updates

    def accumulate(self, batch: AdvantageBatch, rows: Tensor, seed: int = 0) -> Minibatch:
        """Accumulate the gradient of one minibatch's loss over its micro-batches.

        Rows with advantage 0 get only a forward pass, unless the rule declares that it learns from them or the loss has a KL
        term or an entropy bonus. Rows without a grade also get only a forward pass. They count in the denominators, but the
        rule does not see them. A rule of scope "batch" is evaluated on all rows at once, before the first backward pass.

        Args:
            batch: batch with advantages.
            rows: ``(R,)`` rows of the minibatch, across all processes.
            seed: seed for rules that draw random numbers.

        Raises:
            PolicyError: see `judgement` and `measure`.
        """
        counts = self._counts(batch, rows)  # the denominators, across all micro-batches and processes
        is_graded, device = batch.graded[rows], self.accelerator.device
        graded, ungraded = rows[is_graded], self.micro_batches.of(batch, rows[~is_graded])
        micro_batches = self._cut(batch, graded, batch.advantages)
        judged: list[tuple[Tensor, Judgement, Tensor]] = []  # rows, the rule's judgement, and entropies
        gradients: Tensor | None = None  # (B, T), for a rule of scope "batch"
        if self.policy.scope == "batch":
            log_probs, entropy = self.micro_batches.log_probs(self.model, batch, micro_batches)
            inputs = self.clip_inputs(batch, graded, log_probs[graded].to(device), entropy[graded].to(device), seed)
            answer = judgement(self.policy, inputs, counts.select(graded), self.max_length, batch.weights_of(graded))
            judged.append((graded, answer, entropy[graded].to(device)))
            gradients = torch.zeros_like(log_probs, device=device)
            gradients[graded] = answer.gradient
            acting = graded[answer.gradient.any(dim=1).cpu() | self._is_regularized]
            acting = acting if len(acting) else graded[:1]  # a step needs a backward pass
            micro_batches = (
                self.micro_batches.of(batch, acting, learns=True) if self._learns_from(batch.advantages[rows]) else []
            )
        for index, micro_batch in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            with self.optimization.micro_batch(is_last), torch.set_grad_enabled(micro_batch.learns):
                log_probs, entropy = self.micro_batches.forward(self.model, batch, micro_batch.rows)
                gradient = torch.zeros_like(log_probs) if gradients is None else gradients[micro_batch.rows]
                if gradients is None and not micro_batch.is_idle:
                    inputs = self.clip_inputs(batch, micro_batch.rows, log_probs, entropy, seed)
                    share, weights = counts.select(micro_batch.rows), batch.weights_of(micro_batch.rows)
                    answer = judgement(self.policy, inputs, share, self.max_length, weights)
                    judged.append((micro_batch.rows, answer, entropy.detach()))
                    gradient = answer.gradient
                if micro_batch.learns:
                    objective = self._objective(batch, micro_batch.rows, log_probs, entropy, gradient, counts)
                    # the loss is the negated objective; an idle process only participates in the exchange of gradients
                    self.optimization.backward(0.0 * objective if micro_batch.is_idle else -objective)
        scores = torch.zeros(2, *batch.response_mask.shape)
        for judged_rows, answer, entropy in judged:
            scores[:, judged_rows] = torch.stack([answer.inputs.log_probs, entropy]).float().cpu()
        shares = [measure(self.policy, self.config, batch, judged, counts, self.max_length)] if judged else []
        if gradients is None:  # otherwise every process has judged all rows
            shares, scores = gather(self.accelerator, shares), self.micro_batches.sum(scores)
        scores += torch.stack(self.micro_batches.log_probs(self.model, batch, ungraded))
        return Minibatch.of(rows, scores[:, rows], shares)

    def clip_inputs(self, batch: AdvantageBatch, rows: Tensor, log_probs: Tensor, entropy: Tensor, seed: int = 0) -> ClipInputs:
        """Build the rule's inputs for the given rows, on the device of ``log_probs``.

        Args:
            batch: batch with advantages.
            rows: ``(R,)``.
            log_probs: ``(R, T)`` from the current model.
            entropy: ``(R, T)`` in nats, from the same pass.
            seed: seed of the optimizer step.
        """
        needs, device, is_scored = self.policy.needs, log_probs.device, isinstance(batch, ScoredBatch)
        optional: dict[str, Tensor] = {}
        for name in TENSORS & needs:
            values = entropy.detach() if name == "old_entropy" and not is_scored else getattr(batch, name)[rows].to(device)
            optional[name] = values if values.ndim == 2 else values[:, None]
        return ClipInputs(
            log_probs=log_probs.detach(),
            old_log_probs=_old_log_probs(batch, rows, log_probs),
            advantages=batch.advantages[rows].to(device),
            response_mask=batch.response_mask[rows].to(device),
            rollout_log_probs=batch.rollout_log_probs[rows].to(device),
            seed=seed,
            max_length=self.max_length if "max_length" in needs else None,
            progress=self.progress if "progress" in needs else None,
            **optional,
        )

    def apply(self, minibatch: Minibatch) -> Update:
        """Take an optimizer step with the accumulated gradient, and advance the learning-rate schedule."""
        lr = float(self.scheduler.get_last_lr()[0])
        limit, norm, stepped = self.config.max_grad_norm, 0.0, False
        if minibatch.learns:
            norm, stepped = self.optimization.apply(limit)
            self.num_nonfinite = 0 if stepped else self.num_nonfinite + 1
        else:
            self.optimization.forget()  # with a zero gradient, AdamW's momentum would still move the weights
        self.advance_schedule(1)  # whether or not the step was taken
        self.num_optimizer_steps += stepped
        if self.num_nonfinite >= self.config.max_nonfinite:
            raise RunError(
                f"the gradient was not finite in {self.num_nonfinite} consecutive updates (learner.max_nonfinite); "
                "lower learner.lr, or check for infinite rewards and for overflow in the model's dtype"
            )
        return Update(
            minibatch,
            grad_norm=norm,
            grad_clipped=limit is not None and norm > limit,
            skipped=not stepped,
            nonfinite=minibatch.learns and not stepped,
            lr=lr,
        )

    def advance_schedule(self, num_updates: int) -> None:
        """Advance the learning-rate schedule, which also counts skipped updates."""
        with warnings.catch_warnings():
            # torch warns if the optimizer has not taken a step yet
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            for _ in range(num_updates):
                self.scheduler.step()

    def _counts(self, batch: Batch, rows: Tensor) -> StepCounts:
        """Return the denominators of a minibatch. `StepCounts.prompt_tokens` has an entry for every row of the batch."""
        mask = batch.response_mask[rows]
        if self.policy.reduction != "prompt_mean":
            return StepCounts.of(mask)
        return StepCounts.of(torch.zeros_like(batch.response_mask).index_copy(0, rows, mask), batch.group_ids[:, None])

    def _ignored(self, batch: Batch) -> list[Tensor]:
        """Return the rows to ignore, if any: those of groups whose rewards (or all named rewards with a weight) are equal."""
        if not self.config.ignore_equal_groups:
            return []
        rewards, ids, graded = {"": batch.rewards}, batch.group_ids[:, None], batch.graded
        if "reward_parts" in self.estimator.needs and batch.reward_parts is not None:
            rewards = {name: part for name, part in batch.reward_parts.items() if self.reward.weights.get(name, 1.0)}
        differs = torch.zeros(len(batch), 1)
        for values in rewards.values():
            differs[graded] += (ops.group_centred(values[graded, None], ids[graded]) != 0).float()
        return [(ops.group_sum(differs, ids) == 0).nonzero()[:, 0]]

    def _learns_from(self, advantages: Tensor) -> bool:
        """Return whether any response can have a gradient."""
        return self._learns_without_advantages or bool((advantages != 0).any())

    def _cut(self, batch: Batch, rows: Tensor, advantages: Tensor | None) -> list[MicroBatch]:
        """Split a minibatch into this process's micro-batches, in the same way for scoring and for training; see `score`.

        Rows without a grade, rows that cannot have a gradient and all other rows are in separate micro-batches. If advantages
        depend on the old log-probs, they are unknown during scoring, so any row with a grade may have a gradient.
        """
        is_graded = batch.graded[rows]
        ungraded, graded = self.micro_batches.of(batch, rows[~is_graded]), rows[is_graded]
        if self.policy.scope == "batch":  # the rule sees log-probs from one pass over all rows
            return ungraded + self.micro_batches.of(batch, graded)
        learning = torch.ones(len(graded), dtype=torch.bool)
        if advantages is not None and not (self._scores_before_advantages or self._learns_without_advantages):
            learning = (advantages[graded] != 0).any(dim=1)
        silent, acting = graded[~learning], graded[learning]
        return ungraded + self.micro_batches.of(batch, silent) + self.micro_batches.of(batch, acting, learns=True)

    def _with_old_log_probs(self, batch: AdvantageBatch, minibatch: Minibatch, others: Sequence[Tensor]) -> ScoredBatch:
        """Add the old log-probs. Those of the first minibatch come from its training pass, all others from a separate pass."""
        cuts = [cut for rows in others for cut in self._cut(batch, rows, batch.advantages)]
        old_log_probs, old_entropy = self.micro_batches.log_probs(self.model, batch, cuts)
        old_log_probs[minibatch.rows], old_entropy[minibatch.rows] = minibatch.log_probs, minibatch.entropy
        return ScoredBatch.of(
            batch, old_log_probs=old_log_probs, old_entropy=old_entropy if "old_entropy" in self.policy.needs else None
        )

    def _objective(
        self, batch: AdvantageBatch, rows: Tensor, log_probs: Tensor, entropy: Tensor, gradient: Tensor, counts: StepCounts
    ) -> Tensor:
        """Return an objective with the rule's ``gradient`` with respect to ``log_probs``, a KL term and an entropy bonus."""
        mask, settings = batch.response_mask[rows].to(log_probs.device), self.config
        reduction = (self.policy.reduction, counts.select(rows), self.max_length)
        if settings.kl_coef > 0:
            old_log_probs = _old_log_probs(batch, rows, log_probs)
            kl = kl_estimate(log_probs, batch.reference(rows, log_probs.device), settings.kl_estimator, old_log_probs)
            gradient = gradient - settings.kl_coef * torch.autograd.grad(reduce_objective(kl, mask, *reduction), log_probs)[0]
        objective = (gradient * log_probs).sum()
        if settings.entropy_coef > 0:
            objective = objective + settings.entropy_coef * reduce_objective(entropy, mask, *reduction)
        return objective


def _old_log_probs(batch: AdvantageBatch, rows: Tensor, log_probs: Tensor) -> Tensor:
    """Return the old log-probs ``(R, T)``. Before the first optimizer step, the current model is the old model."""
    return batch.old_log_probs[rows].to(log_probs.device) if isinstance(batch, ScoredBatch) else log_probs.detach().clone()
