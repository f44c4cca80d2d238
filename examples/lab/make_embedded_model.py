"""Creates the tiny language model that ships with rlzoo, which can add but makes mistakes at a small, constant rate.

    python examples/lab/make_embedded_model.py [--output DIR] [--seed 0] [--steps 9000] [--slip 0.07]

The model is a two-layer Qwen3 with 0.1 million parameters that answers ``3+5+9+6=`` with running totals, as in ``8,17#23``. It
learns from worked solutions in which every total is off by one with probability ``--slip``, and later totals continue from
the wrong total. It therefore knows how to add but makes mistakes about equally often at every step of a sampled solution, so
short sums are mostly right and long sums are mostly wrong. Reinforcement learning can improve both. All 9000 steps are needed.
After 5000 steps with a slip of 0.09, the sampled accuracy was the same, but 40 steps of reinforcement learning gained no
more than 0.05.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import torch
from embedded_card import OPERANDS_MAX, Sample, model_card
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rlzoo.tasks import Task, build_task
from rlzoo.tasks.problem import Problem

PAD, EOS = "<pad>", "<eos>"
OUTPUT = Path(__file__).resolve().parents[2] / "rlzoo" / "models" / "assets" / "embedded"
MAX_LENGTH = 256  # maximum number of tokens in a prompt with its response
MAX_RESPONSE = 96  # maximum number of tokens in a response; the longest solution has 76
FIRST_PROBLEM = 10_000_000  # an index far above those of the first problems, on which reinforcement learning trains
BATCH, POOL = 32, 512
PEAK_LR, WARM_STEPS = 2.5e-3, 100


def make_tokenizer(characters: str = "0123456789+=,#", max_length: int = MAX_LENGTH) -> PreTrainedTokenizerFast:
    """Create a tokenizer with one token per character. Characters outside the vocabulary raise an error."""
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, num_layers: int = 2) -> Qwen3ForCausalLM:
    """Create an untrained model. Its small rotary base lets two layers find the i-th operand."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
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
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def solution_with_slips(question: str, slip: float, generator: random.Random) -> str:
    """Return the worked solution, in which each total is off by one with probability ``slip``.

    Example:
        >>> solution_with_slips("3+5+9+6", 0.0, random.Random(0))
        '8,17#23'
    """
    first, *others = map(int, question.split("+"))
    total, totals = first, []
    for operand in others:
        total += operand
        if generator.random() < slip:
            total += generator.choice((-1, 1))
        totals.append(str(total))
    return ",".join(totals[:-1]) + f"#{totals[-1]}"


def training_problems(task: Task, generator: random.Random) -> Iterator[Problem]:
    """Yield an infinite sequence of training problems. The longest are kept four times as often as the shortest."""
    start = FIRST_PROBLEM
    while True:
        for problem in task.train_problems(start, POOL):
            share = (problem.question.count("+") + 1) / OPERANDS_MAX
            if generator.random() < 0.25 + 0.75 * share:
                yield problem
        start += POOL


def batches(task: Task, slip: float, generator: random.Random) -> Iterator[list[tuple[str, str]]]:
    """Yield batches of (prompt, solution) pairs with similar lengths, so that little computation is spent on padding."""
    problems = training_problems(task, generator)
    while True:
        pool = sorted((next(problems) for _ in range(POOL)), key=lambda problem: len(problem.question))
        chunks = [pool[start : start + BATCH] for start in range(0, POOL, BATCH)]
        generator.shuffle(chunks)
        for chunk in chunks:
            yield [(task.prompt(problem), solution_with_slips(problem.question, slip, generator)) for problem in chunk]


def response_loss(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, batch: list[tuple[str, str]]) -> Tensor:
    """Return the summed cross-entropy of response tokens in nats. Padding is on the right, where attention ignores it."""
    texts = [prompt + solution + EOS for prompt, solution in batch]
    tokens = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    prompt_lengths = torch.tensor([[len(prompt)] for prompt, _ in batch])
    is_response = (torch.arange(tokens.input_ids.shape[1]) >= prompt_lengths) & tokens.attention_mask.bool()
    labels = tokens.input_ids.masked_fill(~is_response, -100)
    logits = model(input_ids=tokens.input_ids[:, :-1]).logits
    return cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


def warm_up(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, task: Task, options: argparse.Namespace) -> None:
    """Train on worked solutions. The learning rate rises for 100 steps and then falls linearly to zero."""
    steps = options.steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_STEPS) * (1 - step / steps))
    progress = task.held_out_problems(256)
    stream, recent, began = batches(task, options.slip, random.Random(options.seed)), [], time.perf_counter()
    for step in range(1, steps + 1):
        batch = next(stream)
        loss = response_loss(model, tokenizer, batch)
        optimizer.zero_grad()
        # The divisor is a constant close to the number of tokens in a batch, so that tokens count equally in short and long
        # sums.
        (loss / (BATCH * 30)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        recent.append(loss.item() / sum(len(solution) + 1 for _, solution in batch))
        if step % 500 == 0 or step == steps:
            accuracy = fmean(sample.reward for sample in sample_all(model, tokenizer, task, progress, seed=options.seed))
            elapsed = time.perf_counter() - began
            print(f"step {step}  loss {fmean(recent):.3f}  sampled accuracy {accuracy:.3f}  {elapsed:.0f} s", flush=True)
            recent.clear()


@torch.no_grad()
def sample_all(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    task: Task,
    problems: list[Problem],
    *,
    seed: int,
    greedy: bool = False,
) -> list[Sample]:
    """Sample one response per problem from the full distribution at temperature 1, or greedily if ``greedy`` is set."""
    torch.manual_seed(seed)
    samples = []
    for start in range(0, len(problems), 256):
        part = problems[start : start + 256]
        prompts = tokenizer([task.prompt(problem) for problem in part], padding=True, return_tensors="pt")
        how = {"do_sample": False, "top_k": None} if greedy else {}
        output = model.generate(**prompts, max_new_tokens=MAX_RESPONSE, **how)[:, prompts.input_ids.shape[1] :]
        texts = tokenizer.batch_decode(output, skip_special_tokens=True)
        lengths = (output != tokenizer.pad_token_id).sum(1).tolist()
        finished = (output == tokenizer.eos_token_id).any(1).tolist()
        questions = [problem.question for problem in part]
        samples += map(Sample, questions, texts, lengths, finished, task.grade(part, texts))
    return samples


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Create the tiny language model that ships with rlzoo.")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder to write (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=9000, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--slip", type=float, default=0.07, help="probability of a wrong total (default: %(default)s)")
    return parser.parse_args()


def measure(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, task: Task, seed: int
) -> tuple[list[Sample], dict[str, float]]:
    """Sample four responses to each of 1000 held-out problems and return the accuracies and shares for the card."""
    problems = task.held_out_problems(1000)
    samples = sample_all(model, tokenizer, task, problems * 4, seed=seed)
    greedy = sample_all(model, tokenizer, task, problems, seed=seed, greedy=True)
    return samples, {
        f"sampled accuracy, 2 to {OPERANDS_MAX} operands": fmean(sample.reward for sample in samples),
        f"greedy accuracy, 2 to {OPERANDS_MAX} operands": fmean(sample.reward for sample in greedy),
        f"well-formed responses, 2 to {OPERANDS_MAX} operands": fmean(sample.well_formed for sample in samples),
    }


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)  # so that the results do not depend on the number of cores
    torch.manual_seed(options.seed)
    task = build_task({"name": "arithmetic", "num_operands_min": 2, "num_operands_max": OPERANDS_MAX, "seed": options.seed})
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    warm_up(model, tokenizer, task, options)

    samples, numbers = measure(model, tokenizer, task, options.seed)
    options.output.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)
    # the file is created with access only for its owner, but every user of the package must be able to read it
    (options.output / "model.safetensors").chmod(0o644)
    card = model_card(model.num_parameters(), options.steps * BATCH, samples, numbers, options)
    (options.output / "README.md").write_text(card, encoding="utf-8")
    print(card)


if __name__ == "__main__":
    main()
