"""Run by two processes: trains under FSDP2, saves, resumes, and writes the weights of each stage."""

import json
import sys
from pathlib import Path

import torch
from rlzoo_fspo import FSPO
from safetensors.torch import save_file

from rlzoo.config.sections import LaunchConfig, LearnerConfig
from rlzoo.learner.learner import Learner
from rlzoo.models.processes import leave_process_group, make_accelerator
from tests.off_policy import PAD, make_model, off_policy_batch

ROWS = torch.arange(18).split(7)  # 7, 7 and 4 responses: the shares have different numbers of micro-batches


def make_learner(dtype, launch, **settings):
    # in bfloat16, how rows share a pass changes what is rounded, and so one row is a pass
    tokens = 60 if dtype == torch.float32 else 1
    settings = {"lr": 1e-3, "max_grad_norm": 0.5, "num_minibatches": 3, "max_tokens_per_micro_batch": tokens, **settings}
    config = LearnerConfig(**settings)
    accelerator = make_accelerator(launch, config)
    model, sizes = make_model().to(dtype), {"pad_id": PAD, "max_length": 30, "num_updates": 10}
    return Learner(model, FSPO(), config, **sizes, accelerator=accelerator, launch=launch)


def updates(learner, batch, number):
    """Take some updates; returns their gradient norms."""
    taken = range(learner.scheduler.last_epoch, learner.scheduler.last_epoch + number)
    rows = [ROWS[index % 3] for index in taken]
    return [learner.apply(learner.accumulate(batch, each, seed=7)).grad_norm for each in rows]


def weights_of(learner):
    return {name: tensor.clone() for name, tensor in learner.weights()}


def main():
    folder = Path(sys.argv[1])
    results, stages = {}, {}
    launch = LaunchConfig(processes=2, fsdp=True)
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        batch = off_policy_batch(make_model(), FSPO())
        learner = make_learner(dtype, launch)
        parameters = list(learner.model.parameters())
        held = sum(parameter.to_local().numel() for parameter in parameters) / sum(map(torch.numel, parameters))
        norms = updates(learner, batch, 3)
        stages[f"{name}-3"] = weights_of(learner)
        learner.save(folder / name)
        updates(learner, batch, 2)
        stages[f"{name}-5"] = weights_of(learner)
        resumed = make_learner(dtype, launch)
        resumed.log_probs(batch)  # nothing that this pass gathered may outlive the loading
        resumed.load(folder / name, 3, 3)
        stages[f"{name}-resumed-3"] = weights_of(resumed)
        updates(resumed, batch, 2)
        stages[f"{name}-resumed-5"] = weights_of(resumed)
        results[name] = {"norms": norms, "held": held}
    if torch.distributed.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(results))
        for stage, tensors in stages.items():
            save_file(tensors, folder / f"{stage}.safetensors")


if __name__ == "__main__":
    main()
    leave_process_group()
