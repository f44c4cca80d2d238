"""Prints the accuracy and pass@k of models on held-out problems of the task in recurrence.py, by length and multiplier, as CSV.

    python examples/lab/measure_long_model.py MODEL [MODEL ...] [--problems 48] [--k 16] > long.csv

A model is a folder, such as ``RUN/checkpoints/step-000010``. All models answer the same problems with the same random numbers.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import sys
from collections.abc import Iterator
from statistics import fmean, median
from string import ascii_lowercase

from rlzoo.measure.at_k import pass_at
from rlzoo.models.pretrained import eos_token_ids, load_pretrained
from rlzoo.rollout.sampler import HFSampler
from rlzoo.rollout.types import Rollout
from rlzoo.tasks import build_task
from rlzoo.tasks.problem import Problem

STEPS = (1, 4, 16, 64)
"""Smallest number of steps in each row by length. Each row covers two octaves."""
MAX_NEW_TOKENS = 1792


def rows(problems: list[Problem], groups: list[list[Rollout]]) -> Iterator[dict[str, object]]:
    """Yield one row for all problems, one for each range of steps, and one for each multiplier."""
    steps = [int(problem.question.split(",")[1].rstrip("0123456789").rstrip(ascii_lowercase)) for problem in problems]
    letters = [next(character for character in problem.question if character.isalpha()) for problem in problems]
    parts = {"all": list(range(len(problems)))}
    for low, high in zip(STEPS, (*STEPS[1:], 1000), strict=True):
        parts[f"{low} steps or more"] = [place for place, number in enumerate(steps) if low <= number < high]
    for number, letter in enumerate(ascii_lowercase[:9], start=1):
        parts[f"multiplier {number}"] = [place for place, own in enumerate(letters) if own == letter]
    for part, places in parts.items():
        if places:
            chosen = [groups[place] for place in places]
            k = len(chosen[0])
            right = [sum(rollout.reward == 1 for rollout in group) for group in chosen]
            lengths = [rollout.length for group in chosen for rollout in group]
            yield {
                "part": part,
                "problems": len(places),
                "k": k,
                "mean@k": round(fmean(right) / k, 4),
                "pass@k": round(fmean(pass_at(k, number, k) for number in right), 4),
                "mixed groups": round(fmean(0 < number < k for number in right), 4),
                "length mean": round(fmean(lengths), 1),
                "length median": median(lengths),
                "length max": max(lengths),
                "cut off": round(fmean(not rollout.finished for group in chosen for rollout in group), 4),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure models on the recurrence task.")
    parser.add_argument("models", nargs="+", metavar="MODEL", help="folders")
    parser.add_argument("--problems", type=int, default=48, help="held-out problems (default: %(default)s)")
    parser.add_argument("--k", type=int, default=16, help="responses per problem (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the responses (default: %(default)s)")
    options = parser.parse_args()
    task = build_task({"name": "recurrence:RecurrenceTask"})
    problems = task.held_out_problems(options.problems)
    writer = None
    for folder in options.models:
        model, tokenizer = load_pretrained(folder)
        sampler = HFSampler(model, tokenizer, end_ids=eos_token_ids(model, tokenizer), max_new_tokens=MAX_NEW_TOKENS)
        repeated = [problem for problem in problems for _ in range(options.k)]
        rollouts = sampler.sample([task.prompt(problem) for problem in problems], options.k, seed=options.seed)
        rewards = task.grade(repeated, [rollout.text for rollout in rollouts])
        graded = [dataclasses.replace(rollout, reward=reward) for rollout, reward in zip(rollouts, rewards, strict=True)]
        groups = [graded[start : start + options.k] for start in range(0, len(graded), options.k)]
        for row in rows(problems, groups):
            if writer is None:
                writer = csv.DictWriter(sys.stdout, ["model", *row], lineterminator="\n")
                writer.writeheader()
            writer.writerow({"model": folder, **row})


if __name__ == "__main__":
    main()
