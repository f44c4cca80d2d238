"""If one of several processes dies or is asked to stop, the others stop too, and the run can be resumed."""

import os
import re
import signal
import time

import psutil
import pytest

from tests.faults.test_kill import KILLS, start
from tests.training.short import lines

pytestmark = pytest.mark.skipif(KILLS <= 5, reason="in nox -s faults only: each start takes 15 seconds")

SETTINGS = ["--clip", "fspo", "--steps", "400", "--processes", "2"] + [
    word
    for setting in ("rollout.num_prompts=8", "rollout.group_size=4", "rollout.max_new_tokens=20", "eval.num_problems=0",
                    "tracking.mlflow=false", "checkpoint.every=2", "task.num_operands_max=4")
    for word in ("--set", setting)
]  # fmt: skip


@pytest.fixture
def running(tmp_path):
    """Two processes that have saved a checkpoint; the launcher, the ranks by number, the run directory and the log."""
    folder = tmp_path / "run"
    process = start(folder, tmp_path / "mlflow.db", *SETTINGS)
    until = time.monotonic() + 240
    while not list((folder / "checkpoints").glob("step-*")):
        assert process.poll() is None, (tmp_path / "run.log").read_text()[-3000:]
        assert time.monotonic() < until
        time.sleep(0.1)
    found = {
        int(child.environ()["RANK"]): child for child in psutil.Process(process.pid).children() if "RANK" in child.environ()
    }
    assert sorted(found) == [0, 1]
    yield process, found, folder, tmp_path / "run.log"
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rank", [0, 1])
def test_one_process_that_dies_ends_the_others_within_a_minute(running, rank):
    process, ranks, _, log = running
    ranks[rank].kill()
    started = time.monotonic()
    assert process.wait(timeout=60) == 128 + signal.SIGKILL
    assert time.monotonic() - started < 60
    psutil.wait_procs(ranks.values(), timeout=5)
    assert not any(other.is_running() and other.status() != psutil.STATUS_ZOMBIE for other in ranks.values())
    assert (
        f"process {rank} of 2 was killed (SIGKILL), and the others were stopped; "
        "the system kills processes when memory" in log.read_text()
    )


@pytest.mark.timeout(600)
def test_killing_the_launcher_ends_its_processes(running):
    process, ranks, _, _ = running
    process.kill()
    gone, alive = psutil.wait_procs(ranks.values(), timeout=20)
    assert len(gone) == 2
    assert alive == []


@pytest.mark.timeout(600)
def test_sigterm_to_the_launcher_stops_after_the_step_and_the_run_resumes(running):
    process, _, folder, log = running
    process.terminate()
    assert process.wait(timeout=60) == 143
    text = log.read_text()
    (stopped,) = set(re.findall(r"stopped after step (\d+) of 400; resume with: rlzoo train --resume --output", text))
    assert lines(folder / "metrics.jsonl")[-1]["step"] == int(stopped)
    assert (folder / "checkpoints" / f"step-{int(stopped):06d}" / "state" / "state.json").exists()
    assert "Traceback" not in text
