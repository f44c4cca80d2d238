"""Short runs on the shipped model, functions that read their results, and checks of where they are resumed."""

import json
from contextlib import contextmanager, suppress

import pytest
import torch

import rlzoo
from rlzoo import RunConfig
from rlzoo.learner.optimization import kept_weights
from rlzoo.models.pretrained import load_pretrained
from rlzoo.training.run import Run

QUICK = [
    "rollout.num_prompts=8",
    "rollout.group_size=4",
    "task.num_operands_max=4",
    "rollout.max_new_tokens=20",
    "eval.num_problems=20",
    "learner.lr=1e-4",
]


def quick(output, *, clip="fspo", steps=2, overrides=(), **settings):
    is_other_task = "task" in settings or any(each.startswith(("task=", "task.name=")) for each in overrides)
    usual = [each for each in QUICK if not (is_other_task and each.startswith("task."))]
    return RunConfig.compose(clip=clip, overrides=[*usual, *overrides], steps=steps, output=output, **settings)


def make_teacher(folder, scale=0.9):
    """Save the shipped model with a scaled head, which makes it less certain, in bfloat16; returns the folder."""
    model, tokenizer = load_pretrained("embedded", dtype="bfloat16")
    with torch.no_grad():
        model.model.norm.weight.mul_(scale)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def keep_weights(monkeypatch):
    """Return a dict to which runs in this process add their weights before the first update of each step, by step."""
    check, kept = Run.before_update, {}

    def keep(self, batch):
        if batch.step not in kept:
            kept[batch.step] = kept_weights(self.learner.weights(), keep=True)
        check(self, batch)

    monkeypatch.setattr(Run, "before_update", keep)
    return kept


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_times(metrics):
    return [{key: row[key] for key in row if not key.startswith(("time/", "throughput/"))} for row in metrics]


def clocks(folder):
    """Return when each row of a run was written; a truncated row does not count."""
    times = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        with suppress(json.JSONDecodeError):
            row = json.loads(line)
            times[row["step"]] = row["time/clock"]
    return times


def interrupted(config, step):
    """Train, and interrupt the run after a step."""

    def stop(done, metrics):
        if done == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rlzoo.train(config, stop)


@contextmanager
def resumes_after(step, folder):
    """Check that the block resumes a run after this step: only the rows up to it keep their times. None means a new start.

    A run that silently starts again has the same metrics, because runs are deterministic, but later times.
    """
    before = clocks(folder)
    yield
    after = clocks(folder)
    kept = [number for number in after if after[number] == before.get(number)]
    expected = [] if step is None else list(range(step + 1))
    assert kept == expected, f"rows {kept} are as they were, not {expected}"
