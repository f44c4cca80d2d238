"""A TRL trainer whose loss is any installed clip policy: generation, rewards and advantages are TRL's, the rule is rlzoo's.

pip install rlzoo trl && HF_HUB_OFFLINE=1 python examples/trl_trainer.py fspo
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from typing import Any

import torch
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from rlzoo import ClipInputs, ClipPolicy, load_zoo
from rlzoo.reductions import StepCounts, reduce_objective

TRL_LOSS = (
    "beta", "delta", "entropy_coef", "epsilon", "epsilon_high", "importance_sampling_level", "loss_type",
    "off_policy_mask_threshold", "top_entropy_quantile", "use_adaptive_entropy",
)  # fmt: skip
"""Settings of TRL's own loss. They would be read by nobody here, so only their defaults are accepted."""


class ClipPolicyTrainer(GRPOTrainer):
    """`GRPOTrainer` with ``policy=`` in place of ``loss_type=``.

    TRL's: generation, rewards, batching, the optimizer, and the advantages. Those follow ``scale_rewards`` and not
    ``policy.advantage``: "group" is group_norm (with 1e-4 beside the standard deviation, rlzoo has 1e-6), "none" is
    group_mean, and leave_one_out is that times G / (G - 1); "batch" divides by the batch's standard deviation.

    Ours: the objective, and ``policy.reduction`` with the counts of the whole optimizer step, over its micro-batches and
    processes. ``constant_length`` divides by ``max_completion_length``.

    Not supported, and refused: the other terms of TRL's loss (KL to a reference, entropy bonus, router loss) and its
    correction for vLLM's log-probs; rules that adapt to the run; rules with `needs`; rules of scope "batch"
    unless a step is one micro-batch of one process; generating more often than the optimizer steps, since a step's counts are
    then not known in time. Text only.
    """

    def __init__(self, policy: ClipPolicy, **kwargs: Any) -> None:
        """Everything but ``policy`` goes to `GRPOTrainer`."""
        super().__init__(**kwargs)
        self.policy = policy
        args = self.args
        defaults = {field.name: field.default for field in dataclasses.fields(type(args))}
        if changed := [name for name in TRL_LOSS if getattr(args, name) != defaults[name]]:
            raise ValueError(f"{', '.join(changed)}: the loss is the policy's; set its own fields, such as clip_high")
        if self.aux_loss_enabled or (args.use_vllm and args.vllm_importance_sampling_correction):
            raise ValueError("router_aux_loss_coef must be 0 and vllm_importance_sampling_correction False")
        if type(policy).updated is not ClipPolicy.updated:
            raise ValueError(f"{policy.name} adapts to the run, which only rlzoo's own learner does")
        if policy.needs:
            raise ValueError(f"{policy.name} needs {', '.join(sorted(policy.needs))}, which only rlzoo's own learner gives")
        if args.steps_per_generation % args.gradient_accumulation_steps:
            raise ValueError("steps_per_generation must be a multiple of gradient_accumulation_steps")
        if policy.scope == "batch" and args.gradient_accumulation_steps * self.accelerator.num_processes > 1:
            raise ValueError(f"{policy.name} judges a whole step: one process, gradient_accumulation_steps=1")

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        mask = response_mask(inputs)
        input_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        log_probs = self._get_per_token_logps_and_entropies(model, input_ids, attention_mask, mask.shape[1])[0]
        old_log_probs = inputs.get("old_per_token_logps")  # None where TRL knows that the policy has not moved since
        advantages = inputs["advantages"]
        result = self.policy(
            ClipInputs(
                log_probs=log_probs,
                old_log_probs=log_probs.detach() if old_log_probs is None else old_log_probs,
                advantages=advantages[:, None] if advantages.dim() == 1 else advantages,
                response_mask=mask,
                rollout_log_probs=inputs.get("sampling_per_token_logps"),
                seed=self.state.global_step,
            )
        )
        share = reduce_objective(
            result.objective, mask, self.policy.reduction, self.step_counts(inputs), self.max_completion_length
        )
        clipped = result.clipped.float() if result.clipped.shape[1] == 1 else result.clipped[mask].float()
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["clip_fraction"].append(self.accelerator.gather(clipped.mean()).nanmean().item())
        loss: Tensor = -share * self.accelerator.num_processes  # gradients are averaged over processes, the counts are of all
        return loss

    def step_counts(self, inputs: dict[str, Tensor]) -> StepCounts:
        """Responses and tokens of the optimizer step that this micro-batch belongs to."""
        batches = [inputs]
        if self.model.training:  # TRL's buffer holds one generation: the micro-batches of one or of several steps
            buffered: Any = self._buffered_inputs
            size = self.current_gradient_accumulation_steps
            first = self._step % self.args.steps_per_generation // size * size
            batches = buffered[first : first + size]
        masks = [response_mask(batch) for batch in batches]
        local = torch.stack([torch.stack([mask.any(-1).sum(), mask.sum()]) for mask in masks]).sum(0)
        num_responses, num_tokens = self.accelerator.reduce(local, "sum").tolist()
        return StepCounts(num_responses, num_tokens)


def response_mask(inputs: dict[str, Tensor]) -> Tensor:
    """Tokens that the policy chose, ``(B, T)`` bool: not padding, and not what a tool wrote."""
    mask = inputs["completion_mask"].bool()
    return mask & inputs["tool_mask"].bool() if "tool_mask" in inputs else mask


def share_of_digits(completions: list[str], **_: Any) -> list[float]:
    """A reward that a tiny model can feel: the share of characters that are digits."""
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in completions]


def main(name: str = "fspo") -> None:
    """Two generations of two optimizer steps each with rlzoo's embedded model, on the CPU; prints TRL's log lines."""
    from datasets import Dataset

    from rlzoo.models.pretrained import load_pretrained

    model, tokenizer = load_pretrained("embedded", "float32")
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, report_to="none", save_strategy="no", use_cpu=True, bf16=False, gradient_checkpointing=False,
            disable_tqdm=True, max_steps=4, logging_steps=1, learning_rate=1e-3, max_completion_length=16,
            per_device_train_batch_size=8, num_generations=8, gradient_accumulation_steps=2, steps_per_generation=4,
        )  # fmt: skip
        prompts = Dataset.from_dict({"prompt": [f"{a}+{b}=" for a in range(1, 9) for b in range(1, 9)]})
        trainer = ClipPolicyTrainer(
            policy=load_zoo()[name](), model=model, processing_class=tokenizer, args=config, train_dataset=prompts,
            reward_funcs=share_of_digits,
        )  # fmt: skip
        trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:2])
