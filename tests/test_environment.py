"""Settings of the shell and its variables are respected: completion, ``python -m``, caches, stores, GPUs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rlzoo
from rlzoo.journal.tracking.uploads import Upload
from rlzoo.lab.sweep import slots

EMBEDDED = Path(rlzoo.__file__).parent / "models" / "assets" / "embedded"
MODULE = [sys.executable, "-m", "rlzoo"]


def answer(*arguments, **variables):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")} | variables
    return subprocess.run([*MODULE, *arguments], env=environment, capture_output=True, text=True, check=False)


def test_the_module_is_the_command():
    said = answer("--version")
    assert (said.returncode, said.stdout.split()[0]) == (0, "rlzoo")


@pytest.mark.parametrize(
    ("words", "expected"),
    [("rlzoo re", {"replay"}), ("rlzoo clips ", {"list", "show", "check", "new"}), ("rlzoo train --dev", {"--devices"})],
)
def test_the_shell_completes_commands_and_options(words, expected):
    command = [sys.executable, "-c", "import sys; sys.argv[0] = 'rlzoo'; from rlzoo.cli.main import main; main()"]
    count = len(words.split()) - (not words.endswith(" "))
    asked = os.environ | {"_RLZOO_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(count)}
    said = subprocess.run(command, env=asked, capture_output=True, text=True, check=False)
    assert expected <= set(said.stdout.split()), said


@pytest.mark.long
def test_a_model_is_found_in_hf_home(zygote, tmp_path):
    snapshot = tmp_path / "hub" / "models--somebody--adder" / "snapshots" / ("0" * 40)
    shutil.copytree(EMBEDDED, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    run = ["train", "--clip", "fspo", "--set", "model.path=somebody/adder", "--set", "rollout.num_prompts=2", "--steps", "1"]
    quiet = ["--set", "eval.num_problems=0", "--set", "tracking.mlflow=false", "--output"]
    found = answer(*run, *quiet, str(tmp_path / "found"), HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1")
    assert found.returncode == 0, found.stderr
    missed = zygote.run(*run, *quiet, tmp_path / "missed", folder=tmp_path)  # it has read the current HF_HOME
    assert (missed.returncode, "somebody/adder" in missed.stderr) == (2, True)


@pytest.mark.parametrize(("variable", "expected"), [("theirs", "theirs"), ("", "ours"), (None, "ours")])
def test_the_experiment_is_mlflows_variable_if_it_is_set(monkeypatch, variable, expected):
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    if variable is not None:
        monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", variable)
    assert Upload.new("ours", "run", tags={}, params={}).experiment == expected


@pytest.mark.parametrize(
    ("shown", "gpus", "expected"), [("2,5", 2, ["2", "5"]), (None, 3, ["0", "1", "2"]), ("GPU-ab", 1, ["GPU-ab"])]
)
def test_a_sweep_uses_the_visible_gpus(monkeypatch, shown, gpus, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert [place["CUDA_VISIBLE_DEVICES"] for place in slots(None)] == expected
