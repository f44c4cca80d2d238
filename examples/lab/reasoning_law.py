"""Measures how one policy-gradient step moves the log-probs of a reasoning model's responses, by position and by length.

    python -m examples.lab.reasoning_law MODEL TRAIN TEST --output FOLDER [--results FOLDER] [--texts 200] [--max-tokens 512]

TRAIN and TEST are files of questions and answers (``gsm8k_train.jsonl``, ``gsm8k_test.jsonl``). The model answers eight
questions from TRAIN eight times each. The answers are graded, and their advantages are normalised within each question. A step
moves every weight by the same amount, in the direction of the sign of the gradient (Adam's first step):

- ``mean``: the objective is the mean over a response's tokens, as in GSPO and GRPO.
- ``sum``: the objective is the sum over a response's tokens, as in FSPO and RLOO.
- ``random``: every direction is random.

All steps are scaled to the same spread of token log-ratios. The model then answers questions from TEST once each, and the
log-ratio of every token of these answers is computed before and after each step. ``reasoning-law.csv`` has the summed
log-ratio of the first L tokens of each answer for several L, and of the whole answer. ``reasoning-law-positions.csv`` has the
variance at each position. ``reasoning-law-fit.csv`` has the growth of the spread with the length, and the clip rates that the
token variances of every other answer predict for the rest. To resume, repeat the command.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from examples.lab.length_law import KINDS, SPREAD, Array, Document, Row, log_probs, move, sampled, write
from examples.lab.length_law_fit import BANDS, NUM_RESAMPLES, Windows, clipped, width, words
from examples.lab.length_law_texts import binomial_intervals, summed_token_variances
from rlzoo.models.pretrained import load_pretrained
from rlzoo.rollout.sampler import HFSampler
from rlzoo.tasks.task import Task, build_task

QUESTIONS, GROUP = 8, 8
PROBE = 6  # number of the first answers that set the size of a step
LENGTHS = (16, 32, 64, 128, 181, 256, 362)


def answers(
    folder: Path, path: str, task: Task, texts: int, max_tokens: int
) -> tuple[list[Document], list[Document], list[float]]:
    """Return the answers for the gradient, the answers to measure, and the advantages of the former."""
    model, tokenizer = load_pretrained(path)
    ends: Any = model.generation_config.eos_token_id
    end_ids = frozenset([tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])]) - {None}
    chat = tokenizer.chat_template is not None
    sampler = HFSampler(model, tokenizer, max_new_tokens=max_tokens, end_ids=end_ids, chat_template=chat, batch_size=64)
    lessons = task.train_problems(0, QUESTIONS)
    training = sampled(folder / "training.json", sampler, task.prompts(lessons), GROUP, seed=0)
    measured, problems = [], task.held_out_problems(texts)
    for start in range(0, len(problems), 64):
        part = task.prompts(problems[start : start + 64])
        measured += sampled(folder / f"measured-{start}.json", sampler, part, 1, seed=1 + start)
    responses = [tokenizer.decode(response, skip_special_tokens=True) for _, response in training]
    grades = task.grade([problem for problem in lessons for _ in range(GROUP)], responses)
    rewards = torch.tensor([float(grade or 0.0) for grade in grades]).view(-1, GROUP)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
    cut = sum(len(response) >= max_tokens for _, response in measured)
    print(
        f"{int(rewards.sum())} of {rewards.numel()} answers right; {cut} of {len(measured)} measured answers cut off",
        flush=True,
    )
    return training, measured, advantages.flatten().tolist()


def direction(model: Any, kind: str, given: Sequence[tuple[Document, float]]) -> list[Tensor]:
    """Return the direction of a step as a sign for every weight."""
    if kind == "random":
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(p.shape, generator=generator).sign().to(torch.int8) for p in model.parameters()]
    model.zero_grad()
    for document, advantage in given:
        if advantage:
            each = log_probs(model, document)
            (advantage * (each.mean() if kind == "mean" else each.sum())).backward()
    signs = [(torch.zeros_like(p) if p.grad is None else p.grad.sign()).to(torch.int8) for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return signs


@torch.no_grad()
def of_all(folder: Path, name: str, model: Any, documents: Sequence[Document]) -> list[Array]:
    """Return the log-probs of every answer, read from the folder where possible."""
    rows = []
    for number, document in enumerate(documents):
        file = folder / f"{name}-{number}.npy"
        if not file.exists():
            temporary = file.with_suffix(".tmp.npy")
            np.save(temporary, log_probs(model, document).double().numpy())
            temporary.replace(file)
            if number % 20 == 0:
                print(f"{name}: {number} of {len(documents)} answers", flush=True)
        rows.append(np.load(file))
    return rows


def log_ratios(
    folder: Path, path: str, documents: Sequence[Document], given: Sequence[tuple[Document, float]]
) -> dict[str, list[Array]]:
    """Return the token log-ratios of every answer after each kind of step."""
    model, _ = load_pretrained(path)
    before, found = of_all(folder, "base", model, documents), {}
    base, weights = np.concatenate(before[:PROBE]), [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def at(signs: Sequence[Tensor], size: float) -> None:
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.copy_(weight)
        move(model, signs, size)

    for kind in KINDS:
        if not all((folder / f"{kind}-{number}.npy").exists() for number in range(len(documents))):
            signs, size = direction(model, kind, given), 1e-6
            for _ in range(3):  # the spread is nearly proportional to the size of a small step
                at(signs, size)
                with torch.no_grad():
                    moved = np.concatenate([log_probs(model, document).double().numpy() for document in documents[:PROBE]])
                size *= SPREAD / float(np.sqrt(np.square(moved - base).mean()))
            at(signs, size)
            print(f"{kind}: a step of {size:.3g} for every weight", flush=True)
            of_all(folder, kind, model, documents)
            at(signs, 0.0)
        found[kind] = [after - earlier for after, earlier in zip(of_all(folder, kind, model, documents), before, strict=True)]
    return found


def sums(found: dict[str, list[Array]], max_tokens: int) -> list[Row]:
    """Return the summed log-ratios of the first L tokens of every answer, and with L = its length those of the whole answer."""
    rows: list[Row] = []
    for number, row in enumerate(found["random"]):
        for length in [*(length for length in LENGTHS if length < len(row)), len(row)]:
            totals = {kind: float(each[number][:length].sum()) for kind, each in found.items()}
            whole = length == len(row)
            rows.append(
                {"answer": number, "length": length, "whole": whole, "cut_off": whole and length >= max_tokens, **totals}
            )
    return rows


def positions(found: dict[str, list[Array]]) -> list[Row]:
    """Return the number of answers that reach each position and the variance of their log-ratios there."""
    longest = max(map(len, found["random"]))
    padded = {kind: np.full((len(rows), longest), np.nan) for kind, rows in found.items()}
    for kind, rows in found.items():
        for target, row in zip(padded[kind], rows, strict=True):
            target[: len(row)] = row
    reached = (~np.isnan(padded["random"])).sum(0)
    variances = {kind: np.nanvar(values[:, reached > 1], axis=0, ddof=1) for kind, values in padded.items()}
    return [
        {"position": 1 + t, "answers": int(reached[t]), **{kind: float(values[t]) for kind, values in variances.items()}}
        for t in range(int((reached > 1).sum()))
    ]


def analysed(kind: str, rows: Sequence[Array]) -> dict[str, Any]:
    """Return how the spread grows with the length, and how well token variances predict clip rates of other answers."""
    lengths = np.array([length for length in LENGTHS if sum(len(row) >= length for row in rows) >= 20])

    def windows(chosen: Sequence[int]) -> Windows:
        each = [
            (number, length, rows[number][:length].sum())
            for number in chosen
            for length in lengths
            if length <= len(rows[number])
        ]
        return Windows(*np.array(each, dtype=float).T)

    def exponent(some: Windows) -> float:
        return float(np.polyfit(np.log(lengths), np.log(np.sqrt(some.variances())), 1)[0])

    everything, rng = windows(range(len(rows))), np.random.default_rng(0)
    drawn = [exponent(everything.resampled(rng)) for _ in range(NUM_RESAMPLES)]
    fitted, tested = windows(range(0, len(rows), 2)), windows(range(1, len(rows), 2))
    spread = dict(zip(lengths.tolist(), np.sqrt(summed_token_variances(rows[::2], lengths)), strict=True))
    shape = np.abs(fitted.total) / np.array([spread[length] for length in fitted.length.tolist()])
    result: dict[str, Any] = {
        "step": kind,
        "answers": len(rows),
        "lengths": words(lengths),
        "sd": words(np.sqrt(everything.variances())),
        "exponent": exponent(everything),
        "exponent_low": float(np.quantile(drawn, 0.025)),
        "exponent_high": float(np.quantile(drawn, 0.975)),
    }
    for band, power in BANDS.items():
        edge = width(fitted, power)
        expected = np.array([(shape * spread[length] > edge * length**power).mean() for length in lengths.tolist()])
        low, high = binomial_intervals(clipped(tested, edge, power), tested)
        held = (low <= expected) & (expected <= high)
        result |= {
            f"clip by {band}": words(clipped(tested, edge, power)),
            f"predicted clip by {band}": words(expected),
            f"held by {band}": f"{int(held.sum())} of {len(held)}",
        }
    return result


def main() -> None:
    """Sample the answers, take the steps, measure the log-ratios, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file, a folder or a hub name; embedded needs no files of questions")
    parser.add_argument("train", nargs="?", help="questions for the gradient")
    parser.add_argument("test", nargs="?", help="questions whose answers are measured")
    parser.add_argument("--output", type=Path, required=True, help="folder for results, from which the command resumes")
    parser.add_argument("--results", type=Path, help="folder for the CSV files (default: --output)")
    parser.add_argument("--texts", type=int, default=200, help="number of measured answers (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=512, help="limit of an answer in tokens (default: %(default)s)")
    parsed = parser.parse_args()
    files = {"name": "math_file", "path": parsed.train, "eval_path": parsed.test} if parsed.train else {"name": "arithmetic"}
    results = parsed.results or parsed.output
    for folder in (parsed.output, results):
        folder.mkdir(parents=True, exist_ok=True)
    with build_task({**files, "seed": 0}) as task:
        training, measured, advantages = answers(parsed.output, parsed.model, task, parsed.texts, parsed.max_tokens)
    found = log_ratios(parsed.output, parsed.model, measured, list(zip(training, advantages, strict=True)))
    write(results / "reasoning-law.csv", sums(found, parsed.max_tokens))
    write(results / "reasoning-law-positions.csv", positions(found))
    rows = [analysed(kind, found[kind]) for kind in KINDS]
    write(results / "reasoning-law-fit.csv", rows)
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
