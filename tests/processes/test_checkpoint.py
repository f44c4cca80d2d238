"""A DeepSpeed checkpoint is read without running code that somebody may have put into it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlzoo.journal.manifest import damage, seal
from tests.processes.test_processes import environment

pytestmark = pytest.mark.deepspeed


class Planted:
    """Runs a command when it is unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


def train(*arguments):
    told = {"HF_HUB_OFFLINE": "1", **environment("zero2"), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    quick = "tracking.mlflow=false rollout.num_prompts=4 rollout.group_size=4 rollout.max_new_tokens=16 eval.num_problems=0"
    options = [part for setting in quick.split() for part in ("--set", setting)] if "--clip" in arguments else []
    command = [sys.executable, "-m", "rlzoo", "train", *map(str, arguments), *options]
    return subprocess.run(command, env=told, timeout=280, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_a_planted_command_is_not_run_and_an_intact_checkpoint_is_used(tmp_path, stage):
    run, trap = tmp_path / "run", tmp_path / "trap"
    done = train("--clip", "fspo", "--steps", "1", "--deepspeed", stage, "--output", run)
    assert done.returncode == 0, done.stderr
    (checkpoint,) = (run / "checkpoints").iterdir()
    (states,) = (checkpoint / "state" / "deepspeed").glob("*optim_states.pt")
    whole = states.read_bytes()

    content = torch.load(states, weights_only=False)
    torch.save({**content, "planted": Planted(trap)}, states)
    assert "was changed" in damage(checkpoint)  # the checksums detect this
    seal(checkpoint)  # whoever can plant a command can also do this
    assert damage(checkpoint) is None
    done = train("--resume", "--output", run, "--steps", "2")
    assert done.returncode == 2
    assert "contains objects other than tensors and settings, so it was not loaded" in done.stderr
    assert not trap.exists()

    states.write_bytes(whole)
    seal(checkpoint)
    done = train("--resume", "--output", run, "--steps", "2")
    assert done.returncode == 0, done.stderr
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 2


def test_the_planted_command_runs_under_an_unsafe_load(tmp_path):
    torch.save(Planted(tmp_path / "trap"), tmp_path / "file.pt")
    torch.load(Path(tmp_path / "file.pt"), weights_only=False)
    assert (tmp_path / "trap").is_dir()
