"""Run by several processes: three updates for each rule on one batch; process 0 writes the results."""

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from safetensors.torch import save_file
from torch import nn

from rlzoo import RunConfig, load_zoo
from rlzoo.config.sections import CriticConfig, LaunchConfig, LearnerConfig
from rlzoo.learner.critic import Critic
from rlzoo.learner.learner import Learner
from rlzoo.learner.teacher import Teacher
from rlzoo.models.processes import leave_process_group, make_accelerator
from tests.off_policy import PAD, make_model, off_policy_batch

RULES = ("grpo", "fspo", "m2po")  # of scope token, sequence and batch


class Routed(nn.Module):
    """Sends every token to one of many experts."""

    def __init__(self, width):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(width))

    def forward(self, states):
        expert = states.argmax(-1)
        outputs = torch.zeros_like(states)
        for number in expert.unique().tolist():
            outputs[expert == number] = self.experts[number](states[expert == number])
        return outputs


def with_unused_parts(model):
    """Add a tower that no text reaches, and experts, most of which get no token in a step."""
    torch.manual_seed(1)
    model.tower, model.model.layers[0].mlp = nn.Linear(4, 4), Routed(model.config.hidden_size)
    return model


def with_targets(batch):
    """Return the batch with the values and targets that a critic with a head at 0 might get."""
    noise = torch.randn(2, *batch.response_mask.shape, generator=torch.Generator().manual_seed(4))
    values, targets = torch.where(batch.response_mask, noise, 0.0)
    return replace(batch, values=0.1 * values, value_targets=targets)


def three_updates(rule, launch, num_responses=18, unused=False, teacher=False, critic=False, clip=None, **settings):
    """Metrics of up to three updates, and the weights after them."""
    policy = load_zoo()[rule](**clip or {})
    model = with_unused_parts(make_model()) if unused else make_model()
    batch = off_policy_batch(model, policy, num_responses)
    settings = {"lr": 1e-3, "max_grad_norm": 0.5, "num_minibatches": 3, "max_tokens_per_micro_batch": 60, **settings}
    config = LearnerConfig(**settings)
    launch = LaunchConfig(**launch)
    accelerator = make_accelerator(launch, config)
    others = {"accelerator": accelerator, "launch": launch}
    if teacher:
        others["teacher"] = Teacher(make_model(seed=5).eval(), accelerator, RunConfig(clip=rule, learner=config), None)
    if critic:
        batch, own = with_targets(batch), CriticConfig(lr=1e-3, updates=2, max_grad_norm=0.75, frozen=("attn",))
        others["critic"] = Critic(copy.deepcopy(model), own, config, accelerator, pad_id=PAD, fsdp=launch.fsdp)
    learner = Learner(model, policy, config, pad_id=PAD, max_length=30, num_updates=10, **others)
    if learner.has_reference:
        batch = replace(batch, ref_log_probs=learner.reference_log_probs(batch))
    updates = []
    # 7, 7 and 4 (or 1) responses: the last step is smaller, and the shares have different numbers of micro-batches
    for number, rows in enumerate(torch.arange(num_responses).split(7)):
        if critic:
            learner.critic.updates.clear()
            learner.critic.update(batch, rows)
        update = learner.apply(learner.accumulate(batch, rows, seed=number))
        updates.append(
            {
                "objective": update.minibatch.objective,
                "grad_norm": update.grad_norm,
                "log_probs": update.minibatch.log_probs.sum().item(),
                "responses": len(update.minibatch.table.length),
                "skipped": update.skipped,
                "critic": [
                    number for step in (learner.critic.updates if critic else ()) for number in (step.loss, step.grad_norm)
                ],
            }
        )
    weights = {name: tensor.clone() for name, tensor in learner.weights()}
    if critic:
        scores = learner.critic.score(batch)
        weights |= {f"critic.{name}": tensor.clone() for name, tensor in (*learner.critic.weights(), *scores.items())}
    return updates, weights


def main():
    folder, launch = Path(sys.argv[1]), json.loads(sys.argv[2])
    cases = json.loads(sys.argv[3])
    for name, (rule, settings) in cases.items():
        # the processes stay connected; DeepSpeed accepts one model each
        AcceleratorState._reset_state(reset_partial_state=True)
        updates, weights = three_updates(rule, launch, **settings)
        if torch.distributed.get_rank() == 0:
            (folder / f"{name}.json").write_text(json.dumps(updates))
            save_file(weights, folder / f"{name}.safetensors")


if __name__ == "__main__":
    main()
    leave_process_group()
