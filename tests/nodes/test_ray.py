"""A sweep and a race on a Ray cluster of two machines have the numbers of local ones, even if a machine is lost."""

import os
import signal
import time

import pytest

from tests.nodes.machines import ADDRESSES, FOLDER, Machines, ip, wait, why_not
from tests.training.short import QUICK, lines, without_times

pytest.importorskip("ray", reason="needs the extra ray")
pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

PORT = "6399"
RULE = """
import torch
from rlzoo import ClipBand, ClipPolicy, hookimpl, ops

class Flat(ClipPolicy):
    name, paper, scope = "flat", "none", "sequence"

    def __call__(self, inputs):
        log_ratio = ops.sequence_sum(ops.log_ratio(inputs), inputs.response_mask)
        edge = torch.full_like(log_ratio.detach(), 0.05)
        return ops.clipped_surrogate(log_ratio, inputs.advantages, ClipBand(low=-edge, high=edge))

@hookimpl
def rlzoo_clip_policies():
    return [Flat]
"""
SETTINGS = (*QUICK, "checkpoint.every=1", "task.reward=grade:grade", "tracking.mlflow=false")
GRADE = """
import os
import time

def grade(problem, response):
    time.sleep(float(os.environ.get("PAUSE", "0")))
    return float(response.endswith(problem.answer))
"""
SETS = [word for setting in SETTINGS for word in ("--set", setting)]
SWEEP = ["sweep", "--clip", "grpo,fspo,flat", "--plugin", "flat.py", "--seeds", "2", "--steps", "3", *SETS]
ENVIRONMENT = {"RAY_ADDRESS": f"{ADDRESSES[0]}:{PORT}", "RAY_TMPDIR": str(FOLDER), "PAUSE": "0.05"}


def give_files(machines):
    """Write the user's files to machine 0, and have git ignore them."""
    for name, text in {"grade.py": GRADE, "flat.py": RULE, ".gitignore": "*.py\n"}.items():
        (machines.folders[0] / name).write_text(text)


@pytest.fixture
def cluster(tmp_path):
    """Two machines with a Ray cluster; a test's files are on machine 0."""
    machines = Machines(tmp_path)
    for number, words in enumerate((["--head", f"--port={PORT}"], [f"--address={ADDRESSES[0]}:{PORT}"])):
        words += [f"--node-ip-address={ADDRESSES[number]}", "--num-cpus=1", "--object-store-memory=100000000", "--block"]
        machines.start(number, "ray", "start", *words, "--disable-usage-stats", environment=ENVIRONMENT)
        time.sleep(10)
    give_files(machines)
    time.sleep(10)
    yield machines
    machines.close()


def start(machines, *words):
    return machines.start(0, "python", "-m", "rlzoo", *words, environment=ENVIRONMENT)


def run(machines, *words, code=0):
    codes, _ = wait([start(machines, *words)], limit=600)
    assert codes == [code], machines.log(0)[-3000:]
    return machines.log(0)


def rows(folder):
    return {path.parent.name: without_times(lines(path)) for path in sorted(folder.glob("*/metrics.jsonl"))}


@pytest.fixture
def local(tmp_path):
    """The metrics of the sweep on one machine."""
    alone = tmp_path / "alone"
    alone.mkdir()
    machines = Machines(alone)
    give_files(machines)
    run(machines, *SWEEP, "--output", "local", "--jobs", "1")
    machines.close()
    return rows(machines.folders[0] / "local")


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_sweep_on_two_machines_equals_a_local_one(local, cluster, is_lost):
    process = start(cluster, *SWEEP, "--output", "far", "--on", "ray")
    far = cluster.folders[0] / "far"
    if is_lost:
        while len(list(far.glob("*/checkpoints/step-000001"))) < 2:
            assert process.poll() is None, cluster.log(0)
            time.sleep(0.1)
        for id_ in ip("netns", "pids", cluster.names[1]).split():
            os.kill(int(id_), signal.SIGKILL)
    assert wait([process], limit=600)[0] == [0], cluster.log(0)[-3000:]
    assert "far" not in [path.name for path in cluster.folders[1].iterdir()]
    assert rows(far) == local
    assert ("was lost" in cluster.log(0)) == is_lost


def test_sigterm_saves_the_runs(cluster):
    process = start(cluster, *SWEEP, "--steps", "200", "--output", "far", "--on", "ray")
    far = cluster.folders[0] / "far"
    while len(list(far.glob("*/checkpoints/step-000001"))) < 2:
        assert process.poll() is None, cluster.log(0)
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert wait([process])[0] == [143], cluster.log(0)[-3000:]
    for path in far.glob("*/metrics.jsonl"):
        done = len(lines(path)) - 1
        assert (path.parent / "checkpoints" / f"step-{done:06d}").is_dir()


MISTAKES = {
    "--on 'slurm': unknown (allowed: local, ray)": ["--on", "slurm"],
    "a run needs 3 CPUs and 0 GPUs, and no node has them": ["--on", "ray", "--cpus", "3"],
    "'/data/questions.csv' does not exist on the node machine-1": [
        "--on", "ray", "--set", "task.name=math_file", "--set", "task.path=/data/questions.csv"
    ],
}  # fmt: skip


def test_mistakes_are_reported_in_one_line_before_the_first_run(cluster):
    for line, words in MISTAKES.items():
        log = run(cluster, *SWEEP, "--output", "far", *words, code=2)
        assert line in log.splitlines()[-1]
    assert not (cluster.folders[0] / "far").exists()
