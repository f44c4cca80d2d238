"""A sweep and a race on a Ray cluster of two machines have the numbers of local ones, even if a machine is lost."""

import json
import os
import signal
import time

import pandas as pd
import pytest

import rlzoo
from tests.nodes.machines import ADDRESSES, FOLDER, ROOT, Machines, ip, wait, why_not
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
TRACK = """
about: a test
config:
  model: {path: embedded}
  task: {name: arithmetic, num_operands_max: 4, reward: "grade:grade"}
  rollout: {num_prompts: 8, group_size: 4, max_new_tokens: 20}
  eval: {num_problems: 5, num_samples: 2}
  checkpoint: {every: 1}
  tracking: {mlflow: false}
  steps: 3
learning_rates: [1.0e-4, 3.0e-4, 9.0e-4]
tuning_seeds: [100, 101]
seeds: [200, 201]
clip_fraction: 0.1
reference: grpo
"""
ENVIRONMENT = {"RAY_ADDRESS": f"{ADDRESSES[0]}:{PORT}", "RAY_TMPDIR": str(FOLDER)}


def give_files(machines, folder="."):
    """Write the user's files to a folder of machine 0, and have git ignore them."""
    (machines.folders[0] / folder).mkdir(exist_ok=True)
    for name, text in {"grade.py": GRADE, "flat.py": RULE, "small.yaml": TRACK, ".gitignore": "*.py\n"}.items():
        (machines.folders[0] / folder / name).write_text(text)


@pytest.fixture
def is_lost():
    """Whether the test loses machine 1."""
    return False


@pytest.fixture
def cluster(tmp_path, is_lost):
    """Two machines with a Ray cluster; a test's files are on machine 0. Runs are slow if a machine is lost during them."""
    machines = Machines(tmp_path)
    environment = ENVIRONMENT | {"PAUSE": "0.05" if is_lost else "0"}
    for number, words in enumerate((["--head", f"--port={PORT}"], [f"--address={ADDRESSES[0]}:{PORT}"])):
        words += [f"--node-ip-address={ADDRESSES[number]}", "--num-cpus=1", "--object-store-memory=100000000", "--block"]
        machines.start(number, "ray", "start", *words, "--disable-usage-stats", environment=environment)
        while "Ray runtime started" not in machines.log(number):
            time.sleep(0.1)
    give_files(machines)
    while machines.start(0, "ray", "status", environment=environment).wait() or machines.log(0).count(" node_") < 2:
        pass
    yield machines
    machines.close()


def start(machines, *words, folder="."):
    return machines.start(0, "env", "-C", folder, "python", "-m", "rlzoo", *words, environment=ENVIRONMENT)


def run(machines, *words, folder=".", code=0):
    codes, _ = wait([start(machines, *words, folder=folder)], limit=1200)
    assert codes == [code], machines.log(0)[-3000:]
    return machines.log(0)


def run_program(machines, *words):
    assert machines.start(0, "python", *words, environment=ENVIRONMENT).wait(300) == 0, machines.log(0)[-3000:]
    return machines.log(0)


def sweep(*words, settings=SETTINGS):
    sets = [word for setting in settings for word in ("--set", setting)]
    return ["sweep", "--clip", "grpo,fspo,flat", "--plugin", "flat.py", "--seeds", "2", "--steps", "3", *sets, *words]


def race(*words):
    return ["race", "run", "--track", "small.yaml", "--clip", "flat.py", *words]


def lose_machine_1(machines, process, folder):
    """Kill everything on machine 1 as soon as a run on each machine has a checkpoint."""

    def num_saved():  # `rglob` fails if a folder is removed meanwhile
        return sum(any("step-000001" <= name < "step-1" for name in names) for _, names, _ in os.walk(folder))

    while num_saved() < 2:
        assert process.poll() is None, machines.log(0)
        time.sleep(0.1)
    for id_ in ip("netns", "pids", machines.names[1]).split():
        os.kill(int(id_), signal.SIGKILL)


def rows(folder):
    return {path.parent.name: without_times(lines(path)) for path in sorted(folder.glob("*/metrics.jsonl"))}


def result(folder):
    """Read the result of the race, without times and the command."""
    content = json.loads((folder / "small" / "flat.json").read_text())
    for name in ("step_seconds", "reference_step_seconds", "date", "command"):
        del content[name]
    for record in (*content["tuning"], *content["runs"]):
        del record["seconds"]
    del content["summary"]["relative_step_time"]
    return content


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """The folder of the sweep and the race on one machine."""
    machines = Machines(tmp_path_factory.mktemp("alone"))
    give_files(machines)
    for words in (sweep(), race()):
        run(machines, *words, "--output", f"local-{words[0]}", "--jobs", "2")
    machines.close()
    return machines.folders[0]


@pytest.mark.timeout(1800)  # the first test also waits for the local runs
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_sweep_on_two_machines_equals_a_local_one(local, cluster, is_lost):
    process = start(cluster, *sweep("--output", "far", "--on", "ray"))
    far = cluster.folders[0] / "far"
    if is_lost:
        lose_machine_1(cluster, process, far)
    assert wait([process], limit=1200)[0] == [0], cluster.log(0)[-3000:]
    assert "far" not in [path.name for path in cluster.folders[1].iterdir()]
    assert rows(far) == rows(local / "local-sweep")
    assert ("was lost" in cluster.log(0)) == is_lost


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_race_on_two_machines_equals_a_local_one(local, cluster, is_lost):
    process = start(cluster, *race("--output", "far", "--on", "ray"))
    if is_lost:
        lose_machine_1(cluster, process, cluster.folders[0] / "far")
    assert wait([process], limit=1200)[0] == [0], cluster.log(0)[-3000:]
    assert ("was lost" in cluster.log(0)) == is_lost
    ours, theirs = (result(folder) for folder in (cluster.folders[0] / "far", local / "local-race"))
    assert ours["rule"] == "flat"
    assert ours == theirs


def test_a_replay_in_tasks_equals_one_process(local, cluster):
    """Both machines see the recordings, because they are outside the folder that each machine has to itself."""
    recordings = [str(local / "local-sweep" / name) for name in ("fspo-0", "grpo-0")]
    program = str(ROOT / "examples" / "replay_on_ray.py")
    log = run_program(cluster, program, "fspo,grpo", *recordings)
    expected = [{"recording": path, **rlzoo.replay(path, [rule]).rows[0]} for path in recordings for rule in ("fspo", "grpo")]
    assert log.endswith(pd.DataFrame(expected).to_csv(index=False))


INTERRUPTED = """
import os
import runpy
import signal

from rlzoo.lab import on_ray

store = on_ray.store

def store_and_interrupt(child, files, gone):
    if any("checkpoints" in name for name in files) and not os.path.exists("sent"):
        open("sent", "w").close()
        os.kill(os.getpid(), signal.SIGTERM)
    store(child, files, gone)

on_ray.store = store_and_interrupt
runpy.run_module("rlzoo", run_name="__main__")
"""


def test_sigterm_saves_the_runs(cluster):
    """The signal arrives while the reply of a run is handled."""
    (cluster.folders[0] / "interrupted.py").write_text(INTERRUPTED)
    words = sweep("--steps", "200", "--output", "far", "--on", "ray")
    codes, _ = wait([cluster.start(0, "python", "interrupted.py", *words, environment=ENVIRONMENT)])
    assert codes == [143], cluster.log(0)[-3000:]
    runs = list((cluster.folders[0] / "far").glob("*/metrics.jsonl"))
    assert runs
    for path in runs:
        done = len(lines(path)) - 1
        assert (path.parent / "checkpoints" / f"step-{done:06d}").is_dir()


QUESTIONS = f"{FOLDER}/questions.jsonl"  # outside the current directory, so it does not travel
OTHER_DATA = ["task.name=math_file", f"task.path={QUESTIONS}", "task.reward=grade:grade", "tracking.mlflow=false"]
MISTAKES = {
    "--on 'pbs': unknown (allowed: local, ray, slurm)": sweep("--on", "pbs"),
    "a run needs 3 CPUs and 0 GPUs, and no node has them": sweep("--on", "ray", "--cpus", "3"),
    f"{QUESTIONS!r} does not exist on the node machine-1": sweep("--on", "ray", settings=OTHER_DATA),
}


def test_mistakes_are_reported_in_one_line_before_the_first_run(cluster):
    give_files(cluster, "inner")
    questions = "".join(f'{{"question": "{number} + 1", "answer": "{number + 1}"}}\n' for number in range(30))
    (cluster.folders[0] / "questions.jsonl").write_text(questions)
    for line, words in MISTAKES.items():
        log = run(cluster, *words, "--output", "far", folder="inner", code=2)
        assert line in log.splitlines()[-1]
    assert not (cluster.folders[0] / "inner" / "far").exists()
