"""Runs of a few seconds on the shipped model."""

import rlzoo
from rlzoo import RunConfig

QUICK = ["rollout.num_prompts=12", "rollout.group_size=4", "eval.num_problems=0", "tracking.mlflow=false"]


def quick_run(folder, clip, *overrides, steps=4, seed=0):
    """Train for some steps; returns the result."""
    config = RunConfig.compose(clip=clip, overrides=[*QUICK, *overrides], steps=steps, seed=seed, output=folder)
    return rlzoo.train(config)
