"""The code that each of two processes in `test_trl` runs: ``torchrun -m tests.downstream.trl_two_processes FOLDER RULE...``."""

import dataclasses
import sys
from pathlib import Path

import torch

from rlzoo import load_zoo
from rlzoo.integrations.trl import ClipPolicyTrainer, use_policy
from tests.downstream.test_trl import arguments, micro_batches, step_of, with_model
from tests.off_policy import make_model, off_policy_batch


def main(folder, names):
    model = make_model()
    for name in names:
        batch = off_policy_batch(model, load_zoo()[name](), num_responses=20)
        batch = dataclasses.replace(batch, ref_log_probs=batch.old_log_probs + 0.1)
        trainer = use_policy(with_model(folder, model), name)
        trainer.beta = 0.1
        rank, size = trainer.accelerator.process_index, trainer.accelerator.num_processes
        assert size == 2, "torchrun started two"
        own = micro_batches(batch, 4)[2 * rank : 2 * rank + 2]
        distributed = trainer.accelerator.prepare(trainer.model)
        assert type(distributed).__name__ == "DistributedDataParallel"
        loss, gradient = step_of(trainer, own, distributed)
        trainer._end_update()
        loss = trainer.accelerator.reduce(torch.tensor(loss), "mean").item()
        if rank == 0:
            torch.save({"loss": loss, "gradient": gradient, "metrics": trainer._logged.metrics()}, folder / f"{name}.pt")
    settings = {"gradient_accumulation_steps": 1, "steps_per_generation": 2}
    trainer = ClipPolicyTrainer(policy="fspo-adaptive", record_to=folder / "rollouts", **arguments(folder, **settings))
    trainer.train()
    (folder / f"rule-{trainer.accelerator.process_index}.json").write_text(trainer.policy.model_dump_json())
    trainer.accelerator.wait_for_everyone()  # gloo aborts a process whose peer has exited
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
