"""The learner: turns an experience into optimizer steps, with one denominator per step."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from rlzoo.analysis.response_table import ResponseTable
from rlzoo.engine.adapters import has_adapter, prepare_for_training, without_adapter
from rlzoo.engine.experience import Experience, PaddingSide, micro_batch_cost, micro_batch_tokens
from rlzoo.engine.gradient import StepGradient, StepMeasures
from rlzoo.engine.judge import updated
from rlzoo.engine.mismatch import with_mismatch_weights
from rlzoo.engine.model import ResponseLogProbs, check_packing
from rlzoo.engine.optimization import Applied, make_optimization, make_scheduler, named_weights
from rlzoo.engine.passes import Passes
from rlzoo.engine.processes import make_accelerator
from rlzoo.engine.shaping import with_kl_in_the_reward
from rlzoo.errors import RunError, UserError
from rlzoo.fairness import bin_edges
from rlzoo.policy import ClipPolicy
from rlzoo.reading import SETTINGS, read_text
from rlzoo.redaction import redact_settings, with_secrets_of
from rlzoo.sections import LaunchConfig, LearnerConfig, MismatchConfig, RewardConfig

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
    nonfinite: bool  # the latter
    lr: float


class Learner:
    """Owns the optimizer and the policy's current state.

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
        padding_side: PaddingSide = "right",
        reward: RewardConfig | None = None,
        mismatch: MismatchConfig | None = None,
        accelerator: Accelerator | None = None,
    ) -> None:
        self.policy = policy
        self.config = config
        self.reward = reward or RewardConfig()
        self.mismatch = mismatch or MismatchConfig()
        self.max_length = max_length
        self.num_optimizer_steps = 0
        self.num_nonfinite = 0  # updates in a row whose gradient was not finite
        self.accelerator = accelerator or make_accelerator(LaunchConfig(), config)
        self.passes = self._make_passes(language_model, pad_id, padding_side)
        if config.packing:
            check_packing(language_model)
        prepare_for_training(language_model, config)
        self.language_model = language_model
        module = ResponseLogProbs(language_model, temperature)
        self.reference: ResponseLogProbs | None = None
        if self.has_reference and not has_adapter(language_model):
            self.reference = copy.deepcopy(module).requires_grad_(False).to(self.accelerator.device)
        self.optimization = make_optimization(self.accelerator, module, config)
        self.model = self.optimization.model
        self.scheduler = make_scheduler(self.optimization.optimizer, config, num_updates)

    def _make_passes(self, language_model: PreTrainedModel, pad_id: int, padding_side: PaddingSide) -> Passes:
        is_cpu, sizes = self.accelerator.device.type == "cpu", language_model.config.get_text_config()
        depth = sizes.num_hidden_layers * sizes.hidden_size
        return Passes(
            self.accelerator,
            pad_id=pad_id,
            max_tokens=micro_batch_tokens(self.config.max_tokens_per_micro_batch, is_cpu=is_cpu, depth=depth),
            packing=self.config.packing,
            cost=micro_batch_cost(is_cpu=is_cpu, depth=depth),
            padding_side=padding_side,
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
            settings = redact_settings(self.policy.model_dump(mode="json"))
            (folder / "policy.json").write_text(json.dumps(settings), encoding="utf-8")

    def load(self, folder: Path, num_optimizer_steps: int, scheduler: dict[str, Any]) -> None:
        """Read them back, and go on with the schedule from there.

        Raises:
            UserError: they are not those of such a run.
        """
        self._check_schedule(folder, num_optimizer_steps, scheduler)
        try:
            self.optimization.load(folder, num_optimizer_steps)
            written = json.loads(read_text(folder / "policy.json", SETTINGS))
            settings = with_secrets_of(self.policy.model_dump(mode="json"), written)
            policy = type(self.policy).model_validate_json(json.dumps(settings))
            if type(policy).updated is ClipPolicy.updated and policy != self.policy:
                raise UserError(f"--resume: {str(folder / 'policy.json')!r} holds other settings than this run's clip policy")
            self.policy = policy
        except UserError:
            raise
        except (OSError, ValueError, LookupError, RuntimeError, SafetensorError) as error:
            raise UserError(f"--resume: {str(folder)!r} does not belong to this run: {error}") from error
        self.scheduler.load_state_dict(scheduler)
        for group, lr in zip(self.optimization.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True):
            group["lr"] = lr  # the scheduler sets it only with its next step
        self.num_optimizer_steps = num_optimizer_steps

    def _check_schedule(self, folder: Path, num_optimizer_steps: int, scheduler: Mapping[str, Any]) -> None:
        """Refuse a learning rate that this run cannot have after so many optimizer steps and perhaps skipped updates."""
        own, course, updates = self.scheduler.state_dict(), self.scheduler, scheduler.get("last_epoch")
        if type(updates) is not int or updates < num_optimizer_steps:
            wrong = ["last_epoch"]
        else:
            lr = [base * factor(updates) for base, factor in zip(course.base_lrs, course.lr_lambdas, strict=True)]
            known = {"base_lrs": own["base_lrs"], "_last_lr": lr}
            wrong = [key for key, value in known.items() if scheduler.get(key) != value]
        if wrong or scheduler.keys() != own.keys():
            raise UserError(
                f"--resume: the learning rate's schedule in {str(folder)!r} does not belong to this run: "
                f"{', '.join(wrong) or 'its keys'} cannot be of this run after {num_optimizer_steps} optimizer steps"
            )

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
        number, settings = len(experience), self.config
        rng = torch.Generator().manual_seed(seed)
        epochs = [torch.randperm(number, generator=rng) for _ in range(settings.num_epochs)]
        minibatches = [rows for order in epochs for rows in order.tensor_split(settings.num_minibatches)]
        # before the first step the policy is still the old one: that step's own pass gives its rows' old log-probs
        known_later = minibatches[0] if self.reward.kl_coef == 0 and self.mismatch.correction == "none" else torch.tensor([])
        experience = with_mismatch_weights(self.with_old_log_probs(experience, known_later), self.mismatch)
        if self.reward.kl_coef > 0:
            experience = with_kl_in_the_reward(experience, self.policy.advantage, self.reward)
        updates: list[Update] = []
        for index, rows in enumerate(minibatches):
            if not len(rows):  # fewer responses than minibatches
                self.pass_over(1)
                continue
            if before_update is not None:
                before_update(index)
            is_first = index == 0 and len(known_later) > 0
            update = self.step(experience, rows, seed + index, is_first=is_first)
            if is_first:
                assert experience.old_log_probs is not None
                experience.old_log_probs[rows] = update.log_probs
            updates.append(update)
            if type(self.policy).updated is not ClipPolicy.updated:
                self.policy = updated(self.policy, update.table.clip_stats(bin_edges(experience.lengths)))
        return experience, updates

    def learns_from(self, experience: Experience, rows: Tensor | None = None) -> bool:
        """Whether these rows, or all of them, can have a gradient."""
        if self.config.kl_coef > 0 or self.policy.learns_without_advantages:
            return True
        advantages = experience.advantages if rows is None else experience.advantages[rows]
        return bool((advantages != 0).any())

    def pass_over(self, num_updates: int) -> None:
        """Advance the learning rate past updates that are not taken, so that the schedule ends with the run."""
        with warnings.catch_warnings():
            # torch suspects a mistake where the optimizer has not taken a step yet
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            for _ in range(num_updates):
                self.scheduler.step()

    @torch.no_grad()
    def with_old_log_probs(self, experience: Experience, known_later: Tensor | None = None) -> Experience:
        """Record the log-probs of the policy before its first update, and of the reference if there is one.

        Args:
            experience: the graded rollouts.
            known_later: rows whose old log-probs are left at 0.
        """
        rows = torch.arange(len(experience))
        needed = rows if known_later is None else rows[~torch.isin(rows, known_later)]
        old, _ = self.passes.log_probs(self.model, experience, needed)
        if not self.has_reference:
            return replace(experience, old_log_probs=old)
        if self.reference is None:
            with without_adapter(self.language_model):
                ref, _ = self.passes.log_probs(self.model, experience, rows)
        else:
            with self.accelerator.autocast():
                ref, _ = self.passes.log_probs(self.reference, experience, rows)
        return replace(experience, old_log_probs=old, ref_log_probs=ref)

    def step(self, experience: Experience, rows: Tensor, seed: int = 0, *, is_first: bool = False) -> Update:
        """One optimizer step on some rows of the experience; see `accumulate`."""
        lr = float(self.scheduler.get_last_lr()[0])
        learns = self.learns_from(experience, rows)
        measures = self.accumulate(experience, rows, seed, learns=learns, is_first=is_first)
        if learns and not measures.has_gradient and not bool((experience.advantages[rows] != 0).any()):
            self.optimization.forget()
            learns = False  # with nothing but zeros, AdamW's momentum alone would move the weights
        limit = self.config.max_grad_norm
        applied = self.optimization.apply(limit) if learns else Applied(grad_norm=0.0, stepped=False)
        if applied.stepped:
            self.num_optimizer_steps += 1
        self.pass_over(1)  # skipped or not
        if learns:
            self.num_nonfinite = 0 if applied.stepped else self.num_nonfinite + 1
            if self.num_nonfinite >= self.config.max_nonfinite:
                raise RunError(
                    f"the gradient was not finite {self.num_nonfinite} updates in a row (learner.max_nonfinite); "
                    "lower learner.lr, or look for infinities in the rewards and in the model's type"
                )
        return Update(
            rows,
            measures.log_probs,
            measures.table,
            measures.objective,
            grad_norm=applied.grad_norm,
            grad_clipped=limit is not None and applied.grad_norm > limit,
            skipped=not applied.stepped,
            nonfinite=learns and not applied.stepped,
            lr=lr,
        )

    def accumulate(
        self, experience: Experience, rows: Tensor, seed: int = 0, *, learns: bool = True, is_first: bool = False
    ) -> StepMeasures:
        """Add up the gradient of one step's loss.

        Args:
            experience: with its old log-probs.
            rows: ``(R,)`` of the experience, of all processes.
            seed: of rules that draw at random.
            learns: False to measure only.
            is_first: the rows' old log-probs are those the model gives now.
        """
        step = StepGradient(
            experience,
            rows,
            policy=self.policy,
            config=self.config,
            passes=self.passes,
            optimization=self.optimization,
            max_length=self.max_length,
            seed=seed,
            is_first=is_first,
        )
        return step.add_up(learns=learns)
