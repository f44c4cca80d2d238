"""Turns every rule into a loss for TRL's `GRPOTrainer`, and records rollouts: `ClipPolicyTrainer`, `use_policy`, `record`.

This module targets TRL 1.16 and overrides methods that TRL may change. docs/how-to/trl.md shows how to use it.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlzoo.config.redaction import redact_settings
from rlzoo.core import ops
from rlzoo.core.errors import UserError, shown
from rlzoo.core.fairness import bin_edges
from rlzoo.core.policy import ClipPolicy
from rlzoo.core.reductions import Reduction, StepCounts
from rlzoo.core.settings import user_path
from rlzoo.core.types import ClipInputs
from rlzoo.integrations.rules import check_estimator, rule
from rlzoo.journal.rollout_file import RolloutFile, turns
from rlzoo.learner.judge import Judgement, judgement, updated
from rlzoo.learner.on_policy import on_policy_gradient
from rlzoo.measure.response_table import ResponseTable, group_keys
from rlzoo.models.processes import gather
from rlzoo.support.extras import require_extra
from rlzoo.training.metrics import clip_metrics, policy_settings

require_extra("trl", "trl")

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

logger = logging.getLogger("rlzoo")

LOSS_TYPES: dict[Reduction, str] = {
    "sequence_mean": "grpo",
    "token_mean": "dapo",
    "constant_length": "dr_grpo",
    "sequence_mean_token_sum": "luspo",
}
"""TRL's name for each reduction, which also determines how the KL is reduced."""
REPLACED = {
    "delta": "dual_clip", "epsilon": "{limits}", "epsilon_high": "{limits}", "loss_type": "reduction",
    "importance_sampling_level": "a rule of that scope", "off_policy_mask_threshold": "the rule opsm",
    "top_entropy_quantile": "the rule top-entropy", "sapo_temperature_neg": "the rule sapo",
    "sapo_temperature_pos": "the rule sapo", "vespo_k_neg": "the rule vespo", "vespo_k_pos": "the rule vespo",
    "vespo_lambda_neg": "the rule vespo", "vespo_lambda_pos": "the rule vespo",
}  # fmt: skip
"""Settings of TRL's own rules, and what replaces them. They would be ignored, so only their defaults are accepted."""
ESTIMATORS = {"group": "group_norm", "none": "group_mean"}
"""The estimator that corresponds to each value of ``scale_rewards``."""
STATE = "clip_policy.json"  # file in a checkpoint with the current state of an adaptive rule
ROWS, GROUPS, REWARDS, FINISHED, ENTROPY = (
    "rlzoo_rows", "rlzoo_group_ids", "rlzoo_rewards", "rlzoo_finished", "rlzoo_old_entropy",
)  # fmt: skip
"""Keys that are added to a generation batch, so that every micro-batch still has them after TRL's shuffle."""
ROW_FIELDS = {"group_ids": GROUPS, "rewards": REWARDS, "finished": FINISHED}
"""Per-response fields of `ClipInputs`."""
RECORDED = {
    "rewards": REWARDS,
    "advantages": "advantages",
    "finished": FINISHED,
    "rollout_log_probs": "sampling_per_token_logps",
    "old_log_probs": "old_per_token_logps",
    "ref_log_probs": "ref_per_token_logps",
    "old_entropy": ENTROPY,
}
"""Maps fields of a rollout file to TRL's names for them."""
LOGGED = r"clip/fraction(_length_bin_\d)?|clip/length_bin_\d_edge|fairness/lre_(max|noise)"
"""The rlzoo metrics that are logged for every rule."""


def response_mask(inputs: Mapping[str, Tensor]) -> Tensor:
    """Return a mask ``(B, T)`` of the tokens that the model generated, excluding padding and tool output."""
    mask = inputs["completion_mask"].bool()
    return mask & inputs["tool_mask"].bool() if "tool_mask" in inputs else mask


class RolloutRecorder:
    """Writes every generation batch of a trainer to a separate rollout file in a folder: ``000001.safetensors`` and so on.

    After the last optimizer step on a batch, the main process writes the file with the rows of all processes. A new run needs
    an empty folder. A run that resumes from a checkpoint uses the same folder, continues the checkpoint's numbering, and
    replaces the files of later batches.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = user_path(folder)
        self.number: int | None = None  # number of the current generation batch, counted from 1
        self._tensors: dict[str, Tensor] = {}  # this process's tensors, in sampling order
        self._facts: dict[str, Any] = {}
        self._passes: list[list[tuple[Tensor, Tensor]]] = [[]]  # rows and log-probs of each micro-batch, by optimizer step

    def begin(self, trainer: RecordingTrainer) -> None:
        """Prepare for the next generation batch before it is sampled.

        Raises:
            UserError: the folder contains files that this run did not write.
        """
        self.write(trainer)
        if self.number is None:
            self.number = math.ceil(trainer.state.global_step / trainer.updates_per_generation)
            if trainer.accelerator.is_main_process:
                self._claim(trainer)
        self.number += 1

    def _claim(self, trainer: RecordingTrainer) -> None:
        """Create the folder. Reject a folder that contains files, unless they are from the same run with the same rule."""
        where = f"record_to={str(self.folder)!r}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            names = sorted(path.name for path in self.folder.iterdir())
        except OSError as error:
            raise UserError(f"{where} is not a writable folder: {error}") from error
        if names and trainer.state.global_step == 0:
            raise UserError(f"{where} already contains {names[0]!r}: choose a new or empty folder, or resume from a checkpoint")
        if (last := f"{self.number:06d}.safetensors") in names:
            before, rule = RolloutFile.load(self.folder / last).rule.get("name"), trainer.policy and trainer.policy.name
            if rule != before:
                raise UserError(f"{where} was recorded with {before}, not {rule}: resume with {before}, or choose a new folder")

    def take(self, trainer: RecordingTrainer, output: Mapping[str, Any]) -> None:
        """Store this process's generation batch as it was sampled, before TRL shuffles and splits it."""
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", GROUPS, *RECORDED.values())
        self._tensors = {name: output[name].detach().cpu() for name in names if output.get(name) is not None}
        self._tensors["response_mask"] = mask = response_mask(output).cpu()
        if "tool_mask" in output:
            self._tensors["turn_ids"] = turns(mask)
        step = trainer.state.global_step
        self._facts = {"seed": trainer.args.seed + step, "rule": {}}
        if (policy := trainer.policy) is not None:
            self._facts["rule"] = {"name": policy.name, **redact_settings(policy.model_dump(mode="json"))}
        self._tensors["policy_versions"] = torch.full((len(mask),), step)
        self._passes = [[]]

    def add(self, rows: Tensor, log_probs: Tensor) -> None:
        """Store the log-probs ``(B, T)`` of a micro-batch. ``rows`` are its rows in the process's generation batch."""
        self._passes[-1].append((rows.cpu(), log_probs.detach().float().cpu()))

    def end_update(self) -> None:
        """Mark the end of an optimizer step."""
        self._passes.append([])

    def write(self, trainer: RecordingTrainer) -> None:
        """Gather the data of all processes and write the file. Do nothing if nothing has been sampled since the last file."""
        if not self._tensors:
            return
        passes = [tuple(map(torch.cat, zip(*update, strict=True))) for update in self._passes if update]
        processes = gather(trainer.accelerator, [(self._tensors, passes)])
        self._tensors = {}
        if not trainer.accelerator.is_main_process:
            return
        assert self.number is not None, "a batch begins before it is taken"
        try:
            step = self._joined(trainer, self.number, processes)
        except ValueError as error:  # for example, non-finite log-probs in a diverging run
            logger.warning("generation batch %d was not recorded: %s", self.number, error)
            return
        step.save(self.folder / f"{self.number:06d}.safetensors")

    def _joined(self, trainer: RecordingTrainer, number: int, processes: Sequence[Any]) -> RolloutFile:
        """Join the generation batches of all processes. Each element of ``processes`` contains tensors and updates."""
        tensors = {name: _stacked([process[name] for process, _ in processes]) for name in processes[0][0]}
        starts = itertools.accumulate((len(process[GROUPS]) for process, _ in processes), initial=0)
        offsets = list(starts)[:-1]
        updates = [
            (torch.cat([rows + offset for (rows, _), offset in zip(update, offsets, strict=True)]),
             _stacked([log_probs for _, log_probs in update]))
            for update in zip(*(passes for _, passes in processes), strict=True)
        ]  # fmt: skip
        values = {field: tensors[name] for field, name in RECORDED.items() if name in tensors}
        if "old_log_probs" not in values and updates:  # TRL omits old log-probs if there is only one update per batch
            rows, log_probs = updates[0]
            values["old_log_probs"] = torch.zeros_like(log_probs).index_copy(0, rows, log_probs)
        if "rollout_log_probs" in values and "old_log_probs" in values:  # vLLM reports no log-probs for some tokens
            reported = values["rollout_log_probs"]
            values["rollout_log_probs"] = torch.where(reported.isnan(), values["old_log_probs"], reported)
        return RolloutFile.from_padded(
            number,
            tensors["prompt_ids"],
            tensors["prompt_mask"],
            tensors["completion_ids"],
            tensors["completion_mask"],
            tensors[GROUPS],
            response_mask=tensors["response_mask"],
            updates=updates,
            turn_ids=tensors.get("turn_ids"),
            policy_versions=tensors["policy_versions"],
            temperature=float(trainer.temperature),
            max_length=trainer.max_completion_length,
            num_steps=math.ceil(trainer.state.max_steps / trainer.updates_per_generation),
            model=str(getattr(trainer.model.config, "_name_or_path", "")),
            writer=f"trl {version('trl')}",
            **self._facts,
            **values,
        )


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors along their first dimension, padding ``(B, T)`` tensors with 0 to a common width."""
    if tensors[0].ndim == 1:
        return torch.cat(list(tensors))
    width = max(tensor.shape[1] for tensor in tensors)
    return torch.cat([pad(tensor, (0, width - tensor.shape[1])) for tensor in tensors])


class RecordingTrainer(GRPOTrainer):  # type: ignore[misc]  # untyped
    """A `GRPOTrainer` that writes its rollouts and log-probs to a folder. The rest, including TRL's loss, stays the same."""

    policy: ClipPolicy | None = None
    recorder: RolloutRecorder | None = None
    # values passed between methods that TRL calls one after another
    _graded: tuple[Tensor, list[bool]] | None = None  # all processes' rewards by function; whether each response is finished
    _passed: tuple[Tensor, Tensor | None] | None = None  # log-probs and entropies from the last forward pass
    _num_updates = 0  # optimizer steps since the last generation

    def __init__(self, *args: Any, record_to: str | Path | None = None, **kwargs: Any) -> None:
        """Create a trainer. ``record_to`` is the folder for rollout files, and all other arguments go to `GRPOTrainer`."""
        super().__init__(*args, **kwargs)
        if record_to is not None:
            record(self, record_to)

    @property
    def updates_per_generation(self) -> int:
        """The number of optimizer steps on each generation batch."""
        return int(self.args.steps_per_generation * self.num_iterations // self.args.gradient_accumulation_steps)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as `GRPOTrainer` does, and write the last generation batch even if the run ends in the middle of that batch."""
        result = super().train(*args, **kwargs)
        if self.recorder is not None:
            self.recorder.write(self)
        return result

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        rewards: Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        self._graded = (rewards, [len(ids) > 0 and ids[-1] in ends for ids in completion_ids_list])
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        training = self.model.training
        if training and self.recorder is not None:
            self.recorder.begin(self)
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        assert self._graded is not None, "super() computes the rewards"
        (by_function, finished), self._graded = self._graded, None
        device, number = by_function.device, len(finished)
        if len(output["completion_ids"]) != number:
            raise UserError(
                f"{type(self).__name__} graded {number} responses but trains on {len(output['completion_ids'])}, and rlzoo "
                "cannot match them; select responses before _calculate_rewards"
            )
        rows = torch.arange(number, device=device)
        everywhere = rows + self.accelerator.process_index * number
        rewards = (by_function * self.reward_weights.to(device)).nansum(1)
        output |= {
            ROWS: rows,
            GROUPS: everywhere // (self.num_generations if training else self.num_generations_eval),
            REWARDS: rewards[everywhere],
            FINISHED: torch.tensor(finished, device=device),
        }
        output |= self._scored(output)
        if training:
            self._num_updates = 0
            if self.recorder is not None:
                self.recorder.take(self, output)
        return output

    def _scored(self, output: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the additional tensors to record for a generation batch."""
        return {}

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._passed = result[:2]
        return result

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        self._passed = None
        loss: Tensor = super()._compute_loss(model, inputs)
        if self._passed is None:
            raise UserError(
                f"{type(self).__name__}._compute_loss computes log-probs in its own way; it must call TRL's "
                "_get_per_token_logps_and_entropies"
            )
        if self.recorder is not None and self.model.training:
            self.recorder.add(inputs[ROWS], self._passed[0])
        return loss

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the gradient of a micro-batch."""
        result = super().training_step(*args, **kwargs)
        self._passed = None
        if self._step % self.current_gradient_accumulation_steps == 0:
            self._end_update()
        return result

    def _end_update(self) -> None:
        """Finish an optimizer step after its gradient is complete."""
        self._num_updates += 1
        if self.recorder is not None:
            self.recorder.end_update()
            if self._step % (self.args.steps_per_generation * self.num_iterations) == 0:
                self.recorder.write(self)


@dataclasses.dataclass(slots=True)
class _Judged:
    """A rule's results over several optimizer steps: one row per response, and sums of the rule's metrics over responses."""

    tables: list[ResponseTable] = dataclasses.field(default_factory=list)
    sums: dict[str, float] = dataclasses.field(default_factory=dict)
    num_updates: int = 0
    num_at_ratio_1: int = 0  # number of updates that began with the weights used for sampling

    def add(self, tables: Sequence[ResponseTable], sums: Mapping[str, float]) -> None:
        """Add the rows of responses, and the sums of their metrics."""
        self.tables.extend(tables)
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def metrics(self, watched: Iterable[str] = ()) -> dict[str, float]:
        """Return the logged metrics: `LOGGED`, the rule's ``watched`` metrics, and the means of its own metrics."""
        table = ResponseTable.concat(self.tables)
        if not len(table.length):
            return {}
        wanted = re.compile("|".join([LOGGED, *(re.escape(name).replace("<k>", r"\d") for name in watched)]))
        metrics = {name: value for name, value in clip_metrics(table, with_kl=False).items() if wanted.fullmatch(name)}
        metrics["clip/at_ratio_1"] = self.num_at_ratio_1 / self.num_updates
        return metrics | {f"rule/{name}": value / len(table.length) for name, value in self.sums.items()}


class ClipPolicyTrainer(RecordingTrainer):
    """TRL's `GRPOTrainer` with a rule as its loss.

    The class is also a mixin: ``class Mine(ClipPolicyTrainer, MyGRPOTrainer)`` adds a rule to your own subclass.

    The rule replaces the term of the loss that reads the advantages. TRL computes all other terms in the same forward pass,
    with advantages of 0: the KL to the reference model (``beta``, ``use_bias_correction_kl``), the entropy bonus
    (``entropy_coef``, ``use_adaptive_entropy``) and the router loss.

    The rule's objective is reduced by ``policy.reduction`` with the counts of the whole optimizer step, across micro-batches
    and processes. The advantages are TRL's. docs/how-to/trl.md lists how each setting of TRL works with a rule.
    """

    policy: ClipPolicy
    _configured: ClipPolicy  # the rule at the start of the run, for adaptive rules
    _judged: _Judged  # results from this process in the current optimizer step
    _logged: _Judged  # results from all processes since the last log
    _counted: StepCounts | None = None  # counts for the current optimizer step
    _edges: Tensor | None = None  # length bins of the generation batch, for adaptive rules
    _generation = 0  # number of the generation batch, counted from 1

    def __init__(self, *args: Any, policy: str | ClipPolicy, record_to: str | Path | None = None, **kwargs: Any) -> None:
        """Create a trainer.

        Args:
            *args: arguments of `GRPOTrainer`.
            policy: the rule, or the name of an installed rule, optionally with settings, as in ``"my-rule/width_low:0.02"``.
            record_to: folder for one rollout file per generation batch; see `RolloutRecorder`.
            **kwargs: keyword arguments of `GRPOTrainer`.

        Raises:
            UserError: there is no such rule, or it is not compatible with TRL's settings; the message says why.
        """
        super().__init__(*args, record_to=record_to, **kwargs)
        use_policy(self, policy)

    def _scored(self, output: Mapping[str, Any]) -> dict[str, Tensor]:
        mask = response_mask(output)
        if self.model.training:
            self._generation += 1
            if self.policy.is_adaptive:
                lengths = torch.tensor(gather(self.accelerator, mask.sum(1).tolist()))
                self._edges = bin_edges(lengths[lengths > 0]) if bool(lengths.any()) else None
        if "old_entropy" not in self.policy.needs or "old_per_token_logps" not in output:
            return {}
        # TRL's forward pass for the old log-probs does not compute entropies, which therefore need another pass
        named = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters
        with torch.no_grad():
            _, entropies, _ = self._get_per_token_logps_and_entropies(
                self.model,
                torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1),
                torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1),
                mask.shape[1],
                batch_size=self.args.per_device_train_batch_size,
                compute_entropy=True,
                **{name: value for name, value in output.items() if name in named},  # such as images
            )
        return {ENTROPY: entropies}

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        metrics = self._metrics["train" if self.model.training else "eval"]
        others = super()._compute_loss(model, self._without_advantages(inputs))
        for name in [name for name in metrics if name.startswith("clip_ratio/")]:
            del metrics[name]  # meaningless, because it comes from TRL's own rule with advantages of 0
        assert self._passed is not None, "checked by super()"
        log_probs, entropies = self._passed
        counts, read = self._counts(inputs), self._clip_inputs(inputs, log_probs, entropies)
        # TRL's correction for vLLM's log-probs, for which a rule whose ratio is relative to the sampler already corrects
        weights = None if self.policy.ratio_to_sampler else inputs.get("importance_sampling_ratio")
        judged = judgement(self.policy, read, counts, self.max_completion_length, weights)
        if self.model.training:
            self._measure(judged, inputs, counts, weights)
        # the value of this expression is the objective, and its gradient is the rule's
        objective = judged.objective + (judged.gradient * (log_probs - log_probs.detach())).sum()
        # gradients are averaged across processes, but the counts cover all of them
        loss: Tensor = -objective * self.accelerator.num_processes
        if "policy_loss" in metrics:  # TRL logs this metric if there is an entropy bonus
            # with "dapo", losses are shares of a step; with other types, they are means over a micro-batch
            is_share = self.loss_type == "dapo" or not self.model.training
            size = 1 if is_share else self.current_gradient_accumulation_steps
            metrics["policy_loss"][-1] += self.accelerator.gather(loss.detach() * size).mean().item()
        return others + loss

    def _without_advantages(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return inputs with advantages of 0, so that only the term of TRL's own rule is removed from the loss."""
        without = {**inputs, "advantages": torch.zeros_like(inputs["advantages"])}
        if not (self.beta and self.args.use_bias_correction_kl):  # nothing else needs the ratio, and it may overflow
            without.pop("old_per_token_logps", None)
        return without

    def _counts(self, inputs: Mapping[str, Any]) -> StepCounts:
        """Return the number of responses and tokens in this micro-batch's optimizer step, across all processes."""
        if not self.model.training:
            return self._sum_of_counts([inputs])
        size = self.current_gradient_accumulation_steps
        if self._counted is None or self._step % size == 0:
            # TRL's buffer holds the micro-batches of one generation, for one or more optimizer steps
            first = self._step % self.args.steps_per_generation // size * size
            buffered: Any = self._buffered_inputs
            self._counted = self._sum_of_counts(buffered[first : first + size])
        return self._counted

    def _sum_of_counts(self, batches: Sequence[Mapping[str, Any]]) -> StepCounts:
        masks = [response_mask(batch) for batch in batches]
        local = torch.stack([torch.stack([mask.any(-1).sum(), mask.sum()]) for mask in masks]).sum(0)
        num_responses, num_tokens = self.accelerator.reduce(local, "sum").tolist()
        return StepCounts(num_responses, num_tokens)

    def _clip_inputs(self, inputs: Mapping[str, Any], log_probs: Tensor, entropies: Tensor | None) -> ClipInputs:
        """Return the rule's inputs for a micro-batch."""
        mask, advantages, needs = response_mask(inputs), inputs["advantages"].float(), self.policy.needs
        if advantages.ndim == 1:
            advantages = advantages[:, None]
        if self.policy.scope == "sequence" and advantages.shape[-1] != 1:
            raise UserError(f"the trainer has per-token advantages, but {self.policy.name} needs one per response")
        log_probs = log_probs.detach().float()
        old = inputs.get("old_per_token_logps")  # None if TRL knows that the model has not changed since sampling
        old = log_probs if old is None else old.float()
        reported = inputs.get("sampling_per_token_logps")
        if reported is not None:  # NaN where vLLM reported no log-prob
            reported = torch.where(reported.isnan(), old, reported.float())
        optional: dict[str, Any] = {
            "turn_ids": turns(mask),
            "old_entropy": inputs.get(ENTROPY, entropies),
            "ref_log_probs": inputs.get("ref_per_token_logps"),
            "token_ids": inputs["completion_ids"] * mask,
            "max_length": self.max_completion_length,
            "progress": self._progress,
            **{name: inputs[key][:, None] for name, key in ROW_FIELDS.items() if name in needs},
        }
        needed: dict[str, Any] = {
            name: value.detach() if isinstance(value, Tensor) else value for name, value in optional.items() if name in needs
        }
        seed = self.args.seed + self.state.global_step
        return ClipInputs(log_probs, old, advantages, mask, reported, seed, **needed)

    @property
    def _progress(self) -> float:
        """The completed share of the run's optimizer steps."""
        return min(float(self.state.global_step / max(self.state.max_steps, 1)), 1.0)

    @torch.no_grad()
    def _measure(self, judged: Judgement, inputs: Mapping[str, Any], counts: StepCounts, weights: Tensor | None) -> None:
        """Add the rows of a micro-batch to this process's results for the optimizer step."""
        at_ratio_1 = on_policy_gradient(self.policy, judged.inputs, judged.result, counts, self.max_completion_length, weights)
        mask = judged.inputs.response_mask
        table = ResponseTable.measure(
            judged.inputs,
            judged.result,
            judged.gradient,
            at_ratio_1,
            group=group_keys(self._generation, inputs[GROUPS]),
            entropy=self._passed[1] if self._passed else None,
            turn_ids=turns(mask),
        )
        there = mask.any(-1, keepdim=True)
        sums = {
            name: float(torch.where(there, ops.per_response(values.detach().float(), mask), 0.0).sum())
            for name, values in judged.result.metrics.items()
        }
        self._judged.add([table.where(table.length > 0)], sums)

    def _end_update(self) -> None:
        processes = gather(self.accelerator, [self._judged])
        self._judged = _Judged()
        for process in processes:
            self._logged.add(process.tables, process.sums)
        self._logged.num_updates += 1
        self._logged.num_at_ratio_1 += self._num_updates == 0 and not self.policy.ratio_to_sampler
        if self.policy.is_adaptive and self._edges is not None:
            table = ResponseTable.concat([table for process in processes for table in process.tables])
            if bool(table.gradient_mass.isfinite().all()):
                self.policy = updated(self.policy, table.clip_stats(self._edges, self._progress))
        super()._end_update()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the metrics, including the rule's metrics for the optimizer steps since the last call."""
        if self.model.training and self._logged.num_updates:
            metrics = self._logged.metrics(self.policy.watch) | policy_settings(self.policy, self._configured)
            self._logged = _Judged()
            self._metrics["train"].update({name: [value] for name, value in metrics.items()})
        super().log(logs, start_time)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.policy.is_adaptive and self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            (folder / STATE).write_text(self.policy.model_dump_json(), encoding="utf-8")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self.policy.is_adaptive:
            file = Path(checkpoint) / STATE
            try:
                self.policy = type(self.policy).model_validate_json(file.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise UserError(f"{str(file)!r} does not contain the state of {self.policy.name}: {error}") from error


def use_policy(trainer: GRPOTrainer, policy: str | ClipPolicy, **settings: Any) -> ClipPolicyTrainer:
    """Make a rule the loss of an existing instance of `GRPOTrainer` or a subclass.

    The trainer's new class inherits from `ClipPolicyTrainer` and from the previous class. The trainer keeps its state.

    Args:
        trainer: a trainer that has not started training.
        policy: the rule, or the name of an installed rule.
        **settings: settings for a rule given by name: ``use_policy(trainer, "my-rule", width_low=0.02)``.

    Returns:
        The trainer that was passed in.

    Raises:
        UserError: there is no such rule, or it is not compatible with TRL's settings; the message says why.
    """
    if isinstance(policy, str):
        policy = rule(policy, **settings)
    elif not isinstance(policy, ClipPolicy):
        raise UserError(f"policy={shown(policy)} is neither a rule nor the name of one; pass an instance, such as MyRule()")
    elif settings:
        raise UserError(
            f"{', '.join(settings)}: settings can be passed only with the name of a rule; use policy.replace() for an instance"
        )
    refuse_unfit(trainer, policy)
    policy = _with_advantages_of(trainer, policy)
    _become(trainer, ClipPolicyTrainer)
    rule_trainer: ClipPolicyTrainer = trainer
    rule_trainer.loss_type = LOSS_TYPES[policy.reduction]
    rule_trainer._configured, rule_trainer._judged, rule_trainer._logged = policy, _Judged(), _Judged()
    rule_trainer.policy = policy
    rule_trainer._buffered_inputs = None  # filled by TRL itself
    if rule_trainer.updates_per_generation == 1 and not policy.ratio_to_sampler:
        logger.warning(
            "one optimizer step per generation: the ratio is always 1, so no rule clips anything; set num_iterations=2, or, "
            "if the rule does not need whole groups, set steps_per_generation to at least twice gradient_accumulation_steps"
        )
    return rule_trainer


def record(trainer: GRPOTrainer, folder: str | Path) -> RecordingTrainer:
    """Record the rollouts of an instance of `GRPOTrainer` or a subclass: one rollout file per generation batch.

    The trainer may use TRL's own loss or a rule. ``rlzoo replay FOLDER --clip NAME,NAME`` then reports what each rule would
    have clipped. The trainer's new class inherits from `RecordingTrainer` and from the previous class. A callback would not
    suffice, because transformers does not pass the training data to callbacks.

    Args:
        trainer: a trainer that has not started training.
        folder: a new or empty folder, or the folder of the run whose checkpoint is resumed; see `RolloutRecorder`.

    Returns:
        The trainer that was passed in.

    Raises:
        UserError: the trainer is not a `GRPOTrainer`, or generates responses more often than it takes optimizer steps.
    """
    _refuse_generations(trainer)
    _become(trainer, RecordingTrainer)
    recording: RecordingTrainer = trainer
    recording.recorder, recording._buffered_inputs = RolloutRecorder(folder), None
    return recording


def _become(trainer: GRPOTrainer, kind: type[RecordingTrainer]) -> None:
    """Insert ``kind`` ahead of the trainer's own class, unless the trainer is already an instance of ``kind``."""
    if not isinstance(trainer, kind):
        base = type(trainer)
        trainer.__class__ = type(f"{kind.__name__}Of{base.__name__}", (kind, base), {"__doc__": base.__doc__})


def _refuse_generations(trainer: GRPOTrainer) -> None:
    if not isinstance(trainer, GRPOTrainer):
        raise UserError(f"the trainer is a {type(trainer).__name__}; it must be TRL's GRPOTrainer or a subclass")
    args = trainer.args
    if args.steps_per_generation % args.gradient_accumulation_steps:
        raise UserError(
            f"steps_per_generation={args.steps_per_generation} must be a multiple of gradient_accumulation_steps="
            f"{args.gradient_accumulation_steps}; otherwise an optimizer step begins before all its responses are sampled"
        )


def refuse_unfit(trainer: GRPOTrainer, policy: ClipPolicy) -> None:
    """Reject a rule that would not behave in a trainer as it does in rlzoo, and settings that would be ignored.

    Raises:
        UserError: the rule or a setting is rejected; the message names the first problem and explains it.
    """
    _refuse_generations(trainer)
    args, name = trainer.args, policy.name
    defaults = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    limits = ", ".join(policy.width_fields()) or "the rule's own settings"
    changed = [
        f"{key}={getattr(args, key)!r} (instead: {instead.format(limits=limits)})"
        for key, instead in REPLACED.items()
        if key in defaults and getattr(args, key) != defaults[key]
    ]
    if changed:
        raise UserError(f"{', '.join(changed)}: {name} replaces TRL's own rule, which reads such settings; keep their defaults")
    if policy.reduction not in LOSS_TYPES:
        raise UserError(f"reduction={policy.reduction!r}: TRL has no such mean (allowed: {', '.join(LOSS_TYPES)})")
    if "ref_log_probs" in policy.needs and not args.beta:
        raise UserError(f"{name} needs ref_log_probs, but TRL has a reference model only if beta is above 0; set beta")
    per_step = args.gradient_accumulation_steps * trainer.accelerator.num_processes
    if policy.scope == "batch" and per_step > 1:
        raise UserError(
            f"{name} needs all responses of a step together, but a step has {per_step} micro-batches; use one process and "
            "gradient_accumulation_steps=1"
        )
    if "group_ids" in policy.needs and args.steps_per_generation > 1:
        raise UserError(
            f"{name} compares the responses within a prompt's group, but TRL splits a generation batch into "
            f"{args.steps_per_generation} micro-batches; use steps_per_generation=1, and "
            "num_iterations above 1 for several optimizer steps"
        )


def _with_advantages_of(trainer: GRPOTrainer, policy: ClipPolicy) -> ClipPolicy:
    """Return the rule with the estimator that corresponds to TRL's settings, and warn if the rule is meant for another one.

    Raises:
        UserError: the rule's estimator needs more than rewards, or differs from TRL's although it is not the rule's default.
    """
    args, wanted = trainer.args, policy.advantage
    is_sum = args.multi_objective_aggregation == "sum_then_normalize"
    given = ESTIMATORS.get(args.scale_rewards) if is_sum else "gdpo"
    if wanted == given:
        return policy
    check_estimator(policy, "TRL")
    setting = f"scale_rewards={args.scale_rewards!r}" if is_sum else "multi_objective_aggregation='normalize_then_sum'"
    computed = f"TRL computes the advantages, and {setting} gives {given or 'no estimator of rlzoo'}"
    instead = next((f"; set scale_rewards={value!r}" for value, name in ESTIMATORS.items() if is_sum and name == wanted), "")
    if wanted != type(policy).model_fields["advantage"].default:
        raise UserError(f"advantage={wanted!r}: {computed}{instead}")
    if wanted == "leave_one_out":
        instead = "; scale_rewards='none' gives these advantages times 1 - 1 / num_generations"
    if (wanted, given) != ("leave_one_out", "group_mean"):  # these differ only by a constant factor
        logger.warning("%s is meant for %s advantages, but %s%s", policy.name, wanted, computed, instead)
    return policy if given is None else policy.replace(advantage=given)
