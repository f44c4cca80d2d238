"""Takes three FSPO updates on one batch in every process of `examples.gpu.several`. Process 0 writes the weights."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.gpu.data import make_data, make_model
from rlzoo import load_zoo
from rlzoo.config.sections import LaunchConfig, LearnerConfig
from rlzoo.learner.learner import Learner
from rlzoo.models.processes import leave_process_group, make_accelerator


def start(quick: bool) -> dict[str, Tensor]:
    """Return the weights before the first update."""
    return {name: tensor.detach().clone() for name, tensor in make_model(quick).named_parameters()}


def three_updates(launch: dict[str, Any], quick: bool) -> dict[str, Tensor]:
    """Return the weights after three updates, moved to the CPU."""
    data = make_data("fspo", quick)
    config = LearnerConfig(lr=1e-3, max_grad_norm=0.5, max_tokens_per_micro_batch=96)
    accelerator = make_accelerator(LaunchConfig(**launch), config)
    policy = load_zoo()["fspo"]()
    learner = Learner(make_model(quick), policy, config, pad_id=0, max_length=512, num_updates=10, accelerator=accelerator)
    batch = data.batch
    current = learner.log_probs(batch).double()  # all processes compute this together, so that all have the same old log-probs
    old = torch.where(batch.response_mask, current - data.log_ratios, 0.0).float()
    batch = replace(batch, old_log_probs=old)
    for number, rows in enumerate(torch.arange(len(batch)).tensor_split(3)):
        learner.apply(learner.accumulate(batch, rows, seed=number))
    trained = set(dict(learner.language_model.named_parameters()))
    return {name: tensor.detach().cpu().clone() for name, tensor in learner.weights() if name in trained}


def main(file: Path, launch: dict[str, Any], quick: bool) -> None:
    """Write the weights to a file."""
    from safetensors.torch import save_file

    weights = three_updates(launch, quick)
    if torch.distributed.get_rank() == 0:
        save_file(weights, file)
    leave_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]))
