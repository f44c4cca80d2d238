"""Creates a language model with 1.1 million parameters for a long-tail task whose solutions have 7 to 1,750 tokens.

    python examples/lab/make_long_model.py --output FOLDER [--seed 0] [--steps 1600] [--ratio 0.6] [--slip 0.02]

The model is a three-layer Qwen3 that learns the task in recurrence.py from worked solutions. The multipliers are not equally
frequent in the solutions: each is ``--ratio`` times as frequent as the next smaller multiplier. The model therefore makes
few mistakes with multiplier 1 and many with multiplier 9. In reinforcement learning, all multipliers are equally frequent,
so the model has to acquire skills that it lacks. Each term of a solution is off by one with probability ``--slip``. Sampled
solutions therefore contain mistakes at every length, and long solutions nearly always do.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import torch
from make_embedded_model import EOS, make_tokenizer
from recurrence import worked_terms
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rlzoo.tasks import Task, build_task

CHARACTERS = "0123456789,#abcdefghi"
MAX_LENGTH = 2048  # maximum number of tokens in a prompt with its response; the longest text has 1,764
FIRST_PROBLEM = 10_000_000  # an index far above those of the first problems, on which reinforcement learning trains
POOL = 256
BATCH_TOKENS = 2048
PEAK_LR, WARM_STEPS = 2e-3, 100
WINDOW = 168  # number of tokens after which most solutions are cut off, so that attention is cheap
SHARE_SHORT, SHARE_WHOLE = (
    0.15,
    0.05,
)  # shares of batches whose problems end within the window and of batches with complete solutions


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Return an untrained model with 1.1 million parameters."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=tokenizer.model_max_length,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def multiplier(question: str) -> int:
    """Return the multiplier in a question."""
    return next(ord(character) - ord("a") + 1 for character in question if character.isalpha())


def solution_with_slips(question: str, slip: float, generator: random.Random) -> str:
    """Return the worked solution. Each term is off by one with probability ``slip``, and later terms use the wrong value.

    Example:
        >>> solution_with_slips("004c17,003c42,", 0.0, random.Random(0))
        '002c43,001c71,000#56'
    """
    letter, solution = multiplier(question), ""
    before, last = (int(term[-2:]) for term in question.split(",")[:2])
    for term in worked_terms(question):
        before, last = last, (letter * last + before) % 100
        if generator.random() < slip:
            last = (last + generator.choice((-1, 1))) % 100
        head, tail = term[:4], term[6:]
        solution += f"{head}{last:02}{tail}"
    return solution


def texts(task: Task, ratio: float, slip: float, generator: random.Random) -> Iterator[tuple[str, int]]:
    """Yield each question and solution, and the question's length. Keep multiplier k with probability ``ratio ** (k - 1)``."""
    start = FIRST_PROBLEM
    while True:
        for problem in task.train_problems(start, POOL):
            if generator.random() < ratio ** (multiplier(problem.question) - 1):
                yield problem.question + solution_with_slips(problem.question, slip, generator) + EOS, len(problem.question)
        start += POOL


def batches(ratio: float, slip: float, seed: int) -> Iterator[tuple[list[tuple[str, int]], int]]:
    """Yield batches of three kinds with about the same number of tokens, each paired with the length at which it is cut off."""
    generator = random.Random(seed)
    short, long = (
        texts(build_task({"name": "recurrence:RecurrenceTask", "seed": seed, **limits}), ratio, slip, generator)
        for limits in ({"steps_max": 250}, {"steps_min": WINDOW // 7 - 2})
    )
    while True:
        kind = generator.random()
        stream = short if kind < SHARE_SHORT + SHARE_WHOLE else long
        limit = MAX_LENGTH if SHARE_SHORT <= kind < SHARE_SHORT + SHARE_WHOLE else WINDOW
        rows: list[tuple[str, int]] = []
        while len(rows) * max((min(len(text), limit) for text, _ in rows), default=0) < BATCH_TOKENS:
            rows.append(next(stream))
        yield rows, limit


def warm_up(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, options: argparse.Namespace) -> None:
    """Train on worked solutions. The learning rate rises for 100 steps and then falls linearly to zero."""
    steps = options.steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_STEPS) * (1 - step / steps))
    recent, began = [], time.perf_counter()
    for step, (rows, limit) in zip(range(1, steps + 1), batches(options.ratio, options.slip, options.seed), strict=False):
        ids = tokenizer([text for text, _ in rows], padding=True, padding_side="right", return_tensors="pt").input_ids[
            :, :limit
        ]
        prompt_lengths = torch.tensor([[length] for _, length in rows])
        outside = (torch.arange(ids.shape[1]) < prompt_lengths) | (ids == tokenizer.pad_token_id)
        labels = ids.masked_fill(outside, -100)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids[:, :-1]).logits
        loss = cross_entropy(logits.float().flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        recent.append(loss.item())
        if step % 50 == 0 or step == steps:
            elapsed = time.perf_counter() - began
            print(f"step {step}  loss {fmean(recent):.4f} nats per token {elapsed:.0f} s", flush=True)
            recent.clear()


@torch.no_grad()
def step_accuracy(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> dict[int, float]:
    """Return, for each multiplier, the share of terms in which every token is the model's most likely token."""
    task = build_task({"name": "recurrence:RecurrenceTask", "steps_min": 24, "steps_max": 250})
    found = defaultdict(list)
    for problem in task.held_out_problems(144):
        text = problem.question + "".join(worked_terms(problem.question))
        ids = tokenizer([text[:WINDOW]], return_tensors="pt").input_ids
        right = (model(input_ids=ids[:, :-1]).logits.argmax(-1) == ids[:, 1:])[0, len(problem.question) - 1 :]
        found[multiplier(problem.question)] += right.unflatten(0, (-1, 7)).all(-1).float().tolist()
    return {number: fmean(values) for number, values in sorted(found.items())}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Create a language model for a long-tail task.")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1600, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--ratio", type=float, default=0.6, help="frequency of a multiplier, relative to the one below it")
    parser.add_argument("--slip", type=float, default=0.02, help="probability of a wrong term (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)  # so that the results do not depend on the number of cores
    torch.manual_seed(options.seed)
    tokenizer = make_tokenizer(CHARACTERS, MAX_LENGTH)
    model = make_model(tokenizer)
    print(f"{model.num_parameters():,} parameters", flush=True)
    warm_up(model, tokenizer, options)
    for number, accuracy in step_accuracy(model, tokenizer).items():
        print(f"multiplier {number}: {accuracy:.3f} of the terms right, greedily", flush=True)
    options.output.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)


if __name__ == "__main__":
    main()
