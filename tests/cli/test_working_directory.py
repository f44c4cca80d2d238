"""Modules in the working directory do not replace anything that rlzoo imports, in any process that it starts."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.poison import poison, poisoned
from tests.quick import QUICK

RLZOO = Path(sys.executable).with_name("rlzoo")
REWARD = "def short(problem, response):\n    return -len(response)\n"


def rlzoo(folder, *arguments):
    done = subprocess.run([RLZOO, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert poisoned(folder) == []


@pytest.fixture
def folder(tmp_path):
    """A folder with poisoned modules, and with the module of the configured reward."""
    poison(tmp_path)
    (tmp_path / "own_reward_of_here.py").write_text(REWARD)
    return tmp_path


SETTINGS = [word for setting in [*QUICK, "task.reward=own_reward_of_here:short"] for word in ("--set", setting)]


@pytest.mark.long
def test_grading_workers_import_no_module_from_the_working_directory(folder):
    few = ["--set", "rollout.num_prompts=2", "--set", "rollout.max_new_tokens=8"]
    rlzoo(folder, "train", "--clip", "fspo", "--steps", "1", "--output", "run", *SETTINGS, *few)


@pytest.mark.long
def test_commands_import_no_module_from_the_working_directory(folder):
    # the run of a sweep is its own process, with a worker for the reward
    rlzoo(folder, "sweep", "--clip", "fspo", "--seeds", "1", "--steps", "1", "--output", "sweep", *SETTINGS)
    (run,) = (file.parent for file in folder.glob("sweep/*/metrics.jsonl"))
    rlzoo(folder, "replay", str(run), "--clip", "gspo")


@pytest.mark.long
def test_python_m_searches_the_working_directory_last(tmp_path):
    (tmp_path / "numpy.py").write_text("raise SystemExit('numpy of the working directory')\n")
    command = [sys.executable, "-m", "rlzoo", "clips", "list"]  # imports torch, which imports numpy
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
