"""A run that its own environment kills with ``kill -9`` in the middle of an episode resumes bit for bit."""

import os
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from tests.training.short import lines, without_times

SETTINGS = [
    "rollout.num_prompts=4",
    "rollout.group_size=4",
    "rollout.max_new_tokens=40",
    "checkpoint.every=2",
    "eval.num_problems=4",
    "learner.lr=1e-3",
    "tracking.mlflow=false",
]
STEPS = 4


def command(folder, marker, *more):
    task = [
        "task.name=environment",
        "task.environment=tests.tasks.environments.games:Killer",
        f"task.arguments.marker={marker}",
    ]
    settings = [word for setting in [*task, *SETTINGS] for word in ("--set", setting)]
    words = ["train", "--clip", "fspo-adaptive", "--steps", str(STEPS), "--output", str(folder), *settings, *more]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-m", "rlzoo", *words], env=env, capture_output=True, text=True, check=False)


@pytest.mark.long
def test_a_run_killed_during_an_episode_resumes_bit_for_bit(tmp_path):
    marker = tmp_path / "killed"
    assert command(tmp_path / "killed-run", marker).returncode == -9
    assert marker.with_suffix(".killed").exists(), "the environment killed the run, in the second turn of an episode of step 3"
    assert not (tmp_path / "killed-run" / "rollouts" / "000003.jsonl").exists()
    resumed = command(tmp_path / "killed-run", marker, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    whole = command(tmp_path / "whole-run", marker)  # the marker exists, so nothing is killed
    assert whole.returncode == 0, whole.stderr
    first, second = tmp_path / "killed-run", tmp_path / "whole-run"
    assert without_times(lines(first / "metrics.jsonl")) == without_times(lines(second / "metrics.jsonl"))
    for step in range(1, STEPS + 1):
        name = f"rollouts/{step:06d}"
        assert (first / f"{name}.jsonl").read_bytes() == (second / f"{name}.jsonl").read_bytes()
        ours, theirs = (load_file(folder / f"{name}.safetensors") for folder in (first, second))
        assert ours.keys() == theirs.keys()
        assert all(ours[key].equal(theirs[key]) for key in ours)
    weights = [load_file(folder / "checkpoints" / f"step-{STEPS:06d}" / "model.safetensors") for folder in (first, second)]
    assert all(weights[0][key].equal(weights[1][key]) for key in weights[0])
