"""Whole runs of two steps on the shipped model, and reading what they leave."""

import json

from rlzoo import RunConfig

QUICK = [
    "rollout.num_prompts=8",
    "rollout.group_size=4",
    "task.num_operands_max=4",
    "rollout.max_new_tokens=20",
    "eval.num_problems=20",
    "learner.lr=1e-4",
]


def quick(output, *, clip="fspo", steps=2, overrides=(), **settings):
    return RunConfig.compose(clip=clip, overrides=[*QUICK, *overrides], steps=steps, output=output, **settings)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_times(metrics):
    return [{key: row[key] for key in row if not key.startswith(("time/", "throughput/"))} for row in metrics]
