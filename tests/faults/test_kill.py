"""A run that is killed with ``kill -9`` repeatedly ends like an uninterrupted run: bit for bit, including in the store.

``RLZOO_KILLS`` sets the number of kills; `nox -s faults` uses more than the ordinary suite.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter

import mlflow
import pytest
from safetensors.torch import load_file

from tests.training.short import QUICK, lines, without_times

KILLS = int(os.environ.get("RLZOO_KILLS", "2"))
STEPS, EVERY = 24, 3
SETTINGS = [*QUICK, f"checkpoint.every={EVERY}", "eval.every=6", "tracking.figure_every=6", "learner.schedule=cosine"]
CASES = {
    "fspo-adaptive": (),  # a rule with state
    "ahead": ("rollout.max_staleness=1", "learner.kl_coef=0.01"),  # a batch that is sampled ahead, and a reference model
    "critic": ("clip.advantage=gae", "clip.dual_clip=3", "critic.lr=1e-3", "critic.warmup_steps=8", "critic.updates=2"),
    "dynamic": ("rollout.dynamic_sampling=2", "rollout.num_prompts=6"),
    "band": ("task.name=math_file", "task.path=sums.jsonl", "task.template='{question}='", "task.reward=own_sums:reward",
             "rollout.band=[0.2,0.8]", "rollout.measure_every=4", "rollout.max_staleness=1"),
}  # fmt: skip
REWARD = """
def reward(problem, response):
    return float(response.rpartition("#")[2] == problem.answer)
"""


def start(folder, store, *arguments, zygote=None):
    """Start the command in its own process group: a new interpreter, or a fork of the zygote."""
    words = ["train", "--output", str(folder), *arguments]
    environment = os.environ | {"MLFLOW_TRACKING_URI": f"sqlite:///{store}", "OMP_NUM_THREADS": "1"}
    if zygote is not None:
        log = folder.parent / f"{folder.name}.log"
        return zygote.start(*words, folder=folder.parent, files=(os.devnull, log, log), environment=environment)
    command = [sys.executable, "-m", "rlzoo", *words]
    with (folder.parent / f"{folder.name}.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)


def write_sums(folder):
    """Write the questions and the reward of the case with a band: sums of two to seven digits."""
    sums = ["+".join(str((start + step) % 9 + 1) for step in range(length)) for length in range(2, 8) for start in range(6)]
    rows = [{"question": question, "answer": str(sum(map(int, question.split("+"))))} for question in sums]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "own_sums.py").write_text(REWARD)


def first(case, processes=1):
    clip = {"fspo-adaptive": "fspo-adaptive", "critic": "grpo"}.get(case, "fspo")
    usual = [setting for setting in SETTINGS if case != "band" or not setting.startswith("task.")]
    settings = [word for setting in [*usual, *CASES[case]] for word in ("--set", setting)]
    several = ["--processes", str(processes)] if processes > 1 else []
    return ["--clip", clip, "--steps", str(STEPS), *settings, *several]


def moment(folder):
    """Return what a run is doing, as far as it can be seen from outside."""
    checkpoints = folder / "checkpoints"
    if not (folder / "config.yaml").exists():
        return "before the run directory"
    if not (folder / "metrics.jsonl").exists():
        return "before step 0"
    if any(path.name.startswith(".") for path in checkpoints.iterdir()):
        return "within a checkpoint"
    return "between checkpoints" if any(checkpoints.iterdir()) else "before the first checkpoint"


def wait_for_the_moment(process, folder, kind, rng):
    """Sleep until the run should be killed; returns False if it ended before."""
    deadline, began = time.monotonic() + 120, time.time()
    rows = len(lines_of(folder)) + rng.randint(-EVERY, EVERY)
    while process.poll() is None and time.monotonic() < deadline:
        if kind == "any time" and (time.sleep(rng.uniform(0, 9)) or True):
            return process.poll() is None
        if kind == "within a checkpoint" and moment(folder) == kind:
            time.sleep(rng.uniform(0, 0.03))
            return True
        if kind == "in a step" and len(lines_of(folder)) >= rows and started_anew(folder, began):
            time.sleep(rng.uniform(0, 0.3))
            return process.poll() is None
        time.sleep(0.001)
    return False


def started_anew(folder, began):
    """Whether the run has written a row since ``began``."""
    file = folder / "metrics.jsonl"
    return file.exists() and file.stat().st_mtime > began


def lines_of(folder):
    file = folder / "metrics.jsonl"
    return file.read_bytes().splitlines() if file.exists() else []


def run_killed(folder, store, case, *, kills, seed, processes=1, zygote=None):
    """Kill the run repeatedly, then let it end; returns the moments at which it was killed."""
    rng, moments = random.Random(seed), Counter()
    kinds = ["any time", "within a checkpoint", "in a step"]
    for number in range(10 * kills):
        resumes = (folder / "config.yaml").exists()
        process = start(folder, store, *(["--resume"] if resumes else first(case, processes)), zygote=zygote)
        is_last = sum(moments.values()) >= kills
        if not is_last and wait_for_the_moment(process, folder, kinds[number % 3], rng):
            where = moment(folder)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=60)
            moments[where] += 1
            continue
        assert process.wait(timeout=300) == 0, (folder.parent / f"{folder.name}.log").read_text()[-3000:]
        if is_last:
            return moments
        # it was too fast: give it more to do
        forget_the_last_checkpoint(folder)
    raise AssertionError("the run always ended before it could be killed")


def forget_the_last_checkpoint(folder):
    saved = sorted((folder / "checkpoints").iterdir())
    for path in saved[-1:] if len(saved) > 1 else []:
        path.rename(folder.parent / f"{folder.name}-{path.name}-{time.monotonic_ns()}")


def assert_same(killed, whole):
    rows, expected = (lines(folder / "metrics.jsonl") for folder in (killed, whole))
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert without_times(rows) == without_times(expected)
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (killed, whole)]
    assert [summary["finished"] for summary in summaries] == [True, True]
    for name in ("metrics", "warnings"):
        assert summaries[0][name] == summaries[1][name]
    newest = f"checkpoints/step-{STEPS:06d}"
    files = [path.relative_to(whole) for path in (whole / newest).rglob("*.safetensors")]
    assert len(files) >= 2
    for file in [*files, *(path.relative_to(whole) for path in (whole / "rollouts").glob("*.safetensors"))]:
        got, wanted = load_file(killed / file), load_file(whole / file)
        assert got.keys() == wanted.keys()
        assert all(got[key].equal(wanted[key]) for key in wanted), file
    for path in [*(whole / "rollouts").glob("*.jsonl"), whole / newest / "clip.json"]:
        assert (killed / path.relative_to(whole)).read_text() == path.read_text()
    assert not list((killed / "checkpoints").glob(".*"))


def assert_store_is_complete(store, killed):
    client = mlflow.MlflowClient(f"sqlite:///{store}")
    experiment = client.get_experiment_by_name("rlzoo")
    (run,) = client.search_runs([experiment.experiment_id], f"tags.mlflow.runName = '{killed.name}'")
    assert run.info.status == "FINISHED"
    rows = lines(killed / "metrics.jsonl")
    for name in ("reward/mean", "learner/grad_norm", "eval/accuracy"):
        history = sorted((point.step, point.value) for point in client.get_metric_history(run.info.run_id, name))
        assert history == [(row["step"], row[name]) for row in rows if name in row], name


@pytest.fixture(scope="module")
def whole(tmp_path_factory, zygote):
    """Uninterrupted runs, created on first use."""
    made = {}

    def make(case, processes=1):
        if (case, processes) not in made:
            folder = tmp_path_factory.mktemp("whole") / "run"
            write_sums(folder.parent)
            words = ["train", "--output", folder, *first(case, processes), "--set", "tracking.mlflow=false"]
            done = zygote.run(*words, folder=folder.parent, timeout=300)
            assert done.returncode == 0, done.stderr[-3000:]
            made[case, processes] = folder
        return made[case, processes]

    return make


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", list(CASES) if KILLS > 5 else ["fspo-adaptive"])
@pytest.mark.long
def test_a_repeatedly_killed_run_equals_an_uninterrupted_run(case, whole, zygote, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_sums(tmp_path)
    folder, store = tmp_path / f"{case}-killed", tmp_path / "mlflow.db"
    # nox -s faults uses new interpreters, which are also killed during imports
    moments = run_killed(folder, store, case, kills=KILLS, seed=case, zygote=zygote if KILLS <= 5 else None)
    print(f"{case}: killed {dict(moments)}")
    assert_same(folder, whole(case))
    assert_store_is_complete(store, folder)


@pytest.mark.timeout(3600)
@pytest.mark.skipif(KILLS <= 5, reason="in nox -s faults only: each start takes 15 seconds")
def test_a_repeatedly_killed_two_process_run_equals_an_uninterrupted_one(whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, store = tmp_path / "two-killed", tmp_path / "mlflow.db"
    moments = run_killed(folder, store, "ahead", kills=max(2, KILLS // 6), seed=2, processes=2)
    print(f"two processes: killed {dict(moments)}")
    assert_same(folder, whole("ahead", 2))
    assert_store_is_complete(store, folder)
