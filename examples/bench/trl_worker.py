"""TRL's part of a case: GRPOTrainer, configured to do the same work as rlzoo."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from examples.bench import turns
from examples.bench.cases import GROUP, Case, find


def main(name: str, folder: str) -> None:
    """In each turn, run one step, which consists of one generation and the case's number of optimizer steps."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    case = find(name)
    model = str(case.model(Path(folder)))
    lengths: list[int] = []

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths[:] = [len(ids) for ids in completion_ids]
        return [float(index % 2) for index in range(len(completions))]

    rollout = turns.Clock()

    class Turns(TrainerCallback):
        """Delays each step until it is this worker's turn."""

        started = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % case.updates == 0:
                turns.wait()
                rollout.take()
                Turns.started = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % case.updates == 0:
                turns.settle()
                seconds, sampled = time.perf_counter() - Turns.started, rollout.take()
                peak = turns.peak_bytes()
                turns.report(step=seconds, rollout=sampled, learner=seconds - sampled, tokens=sum(lengths), learner_peak=peak)

    prompts = [case.prompt(index) for index in range(case.num_prompts * 200)]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=_settings(case),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        callbacks=[Turns()],
    )
    trainer._generate = rollout.around(trainer._generate, after=turns.forget_peak)
    trainer._calculate_rewards = rollout.around(trainer._calculate_rewards)
    turns.report(ready=True)
    trainer.train()


def _settings(case: Case) -> Any:
    """Return TRL's configuration for the case."""
    from trl import GRPOConfig

    rows = case.rows or case.completions // case.updates
    passes = case.completions // case.updates // rows
    return GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="trl-bench-"),
        use_cpu=not torch.cuda.is_available(),
        bf16=case.autocast == "bfloat16",
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=passes,
        steps_per_generation=case.updates * passes,
        num_generations=GROUP,
        max_completion_length=case.max_new_tokens,
        temperature=1.0,
        loss_type="grpo",
        beta=0.0,
        epsilon=0.2,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        shuffle_dataset=False,
        max_steps=100_000,
        logging_steps=case.updates,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


if __name__ == "__main__":
    turns.take_standard_output()
    main(*sys.argv[1:])
