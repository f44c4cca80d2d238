"""A run with ZeRO or FSDP2 that is killed with ``kill -9`` and resumed ends like the uninterrupted one."""

import os
import signal
import time

import psutil
import pytest
from safetensors.torch import load_file

from rlzoo.journal.manifest import sealed_files
from tests.faults.test_kill import start
from tests.training.short import lines, without_times

STEPS = 6
SHARDED = {
    "zero2": ["--deepspeed", "zero2"],
    "zero3": ["--deepspeed", "zero3"],
    "zero2 with a critic": ["--deepspeed", "zero2", "--config", "ppo"],
    "fsdp": ["--fsdp"],
    "fsdp in bfloat16": ["--fsdp", "--set", "model.dtype=bfloat16"],
}
MARKS = {name: pytest.mark.long if "fsdp" in name else pytest.mark.deepspeed for name in SHARDED}


@pytest.fixture(scope="module", params=[pytest.param(name, marks=mark) for name, mark in MARKS.items()])
def whole(request, tmp_path_factory):
    """The uninterrupted run, and the arguments that start it."""
    settings = ("rollout.num_prompts=4", "rollout.group_size=4", "rollout.max_new_tokens=16", "eval.num_problems=0",
                "tracking.mlflow=false", "checkpoint.every=2", "learner.lr=1e-3", "learner.num_minibatches=2")  # fmt: skip
    clip = "grpo" if "critic" in request.param else "fspo"
    words = ["--clip", clip, "--steps", str(STEPS), "--processes", "2", *SHARDED[request.param]]
    words += [word for setting in settings for word in ("--set", setting)]
    folder = tmp_path_factory.mktemp(request.param) / "run"
    assert ended(start(folder, folder.parent / "mlflow.db", *words), folder) == 0
    return folder, words


def ended(process, folder):
    try:
        return process.wait(timeout=400)
    finally:
        print((folder.parent / f"{folder.name}.log").read_text()[-3000:])


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("victim", ["rank 0", "rank 1", "the launcher", "everything"])
def test_a_sharded_run_is_killed_and_resumed(whole, tmp_path, victim):
    expected, words = whole
    folder = tmp_path / "run"
    process = start(folder, tmp_path / "mlflow.db", *words)
    until = time.monotonic() + 300
    while not list(folder.glob("checkpoints/step-000002/state/state.json")):
        assert process.poll() is None, (tmp_path / "run.log").read_text()[-3000:]
        assert time.monotonic() < until
        time.sleep(0.02)
    ranks = {
        int(child.environ()["RANK"]): child for child in psutil.Process(process.pid).children() if "RANK" in child.environ()
    }
    if victim == "everything":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        (process if victim == "the launcher" else ranks[int(victim[-1])]).kill()
    process.wait(timeout=60)
    _, alive = psutil.wait_procs(ranks.values(), timeout=30)
    assert not alive
    assert ended(start(folder, tmp_path / "mlflow.db", "--resume"), folder) == 0
    for checkpoint in folder.glob("checkpoints/step-*"):
        files = {str(file.relative_to(checkpoint)) for file in checkpoint.rglob("*") if file.is_file()}
        assert files == {*sealed_files(checkpoint), "manifest.json"}
    assert not list(folder.glob("checkpoints/*aside*"))
    rows, wanted = (without_times(lines(path / "metrics.jsonl")) for path in (folder, expected))
    assert rows == wanted
    weights, others = (load_file(path / f"checkpoints/step-{STEPS:06d}/model.safetensors") for path in (folder, expected))
    assert all(weights[name].equal(others[name]) for name in others)
