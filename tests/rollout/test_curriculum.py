"""A band of mean rewards: which problems a step samples, and that a resumed run samples the same ones."""

import json
import os
import signal
import time
from statistics import fmean

import pytest
import torch
from safetensors.torch import load_file

import rlzoo
from rlzoo import UserError
from rlzoo.config.run_config import RunConfig
from rlzoo.core.errors import RunError
from tests.training.short import QUICK, interrupted, lines, quick, resumes_after, without_times

LOW, HIGH, EVERY, NUMBER = 0.4, 0.6, 5, 8
SETTINGS = [f"rollout.band=[{LOW},{HIGH}]", f"rollout.measure_every={EVERY}", f"rollout.num_prompts={NUMBER}",
            "task.name=math_file", "task.path=sums.jsonl", "task.eval_path=held.jsonl", "task.template='{question}='",
            "task.reward=by_question:reward", "eval.num_problems=0", "tracking.mlflow=false", "checkpoint.every=2",
            "reward.max_failed=0.9"]  # fmt: skip
REWARD = """
import itertools
import pathlib

calls = itertools.count()


def reward(problem, response):
    broken = pathlib.Path("bro" + "ken")  # so that the run does not depend on it
    if broken.exists() and next(calls) >= int(broken.read_text()):
        raise ValueError("the grader is broken")
    kind = int(problem.answer) % 5
    if kind == 4:
        return None if len(response) % 2 else 0.5
    return float(kind == 0 or (kind > 1 and sum(response.encode()) % 3 != kind - 2))
"""


@pytest.fixture
def sums(tmp_path, monkeypatch):
    """A folder with 24 questions, of which some are always right, some always wrong, and some cannot be graded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    rows = [{"question": f"{a}+{b}", "answer": str(a + b)} for a in range(2, 6) for b in range(4, 10)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "held.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    (tmp_path / "by_question.py").write_text(REWARD)
    return rows


def config(folder, *overrides, steps=9):
    return quick(folder, clip="grpo", steps=steps, overrides=[*SETTINGS, *overrides])


def asked(path, step):
    """Return the mean rewards of a step by question, in order; None without grades."""
    rewards = {}
    for row in lines(path / "rollouts" / f"{step:06d}.jsonl"):
        rewards.setdefault(row["question"], []).append(row["reward"])
    graded = {question: [value for value in values if value is not None] for question, values in rewards.items()}
    return {question: fmean(values) if values else None for question, values in graded.items()}


@pytest.mark.parametrize(
    ("staleness", "order"),
    [
        (2, "shuffled"),
        pytest.param(0, "shuffled", marks=pytest.mark.long),
        pytest.param(0, "file", marks=pytest.mark.long),
    ],
)
def test_a_step_samples_the_next_problems_in_the_band_and_then_the_nearest(tmp_path, sums, staleness, order):
    result = rlzoo.train(config("run", f"rollout.max_staleness={staleness}", f"task.order={order}"))
    task = result and config("run").task.model_copy(update={"seed": 0, "order": order})
    means, when, start, expected, filled = {}, {}, 0, {}, 0

    def choose(step):
        nonlocal start, filled
        pool, seen = [], set()
        for place, problem in enumerate(task.train_problems(start, 2 * len(sums))):
            if problem.question not in seen:
                seen.add(problem.question)
                mean = means.get(problem.question)
                gap = 0.0 if mean is None or LOW <= mean <= HIGH else LOW - mean if mean < LOW else mean - HIGH
                gap = 0.0 if mean is not None and step - when[problem.question] >= EVERY else gap
                pool.append((gap, place, problem.question))
        assert len(seen) == len(sums)
        chosen = sorted(pool)[:NUMBER]
        filled += sum(gap > 0 for gap, _, _ in chosen)
        start += max(place for _, place, _ in chosen) + 1
        expected[step] = [question for _, _, question in chosen]

    for step in range(1, 10):
        if step not in expected:
            choose(step)
        got = asked(result.path, step)
        assert list(got) == expected[step]
        # the batches of later steps are chosen when the step has been sampled
        for question, mean in got.items():
            if mean is not None:
                means[question], when[question] = mean, step
        for later in range(step + 1, min(step + staleness, 9) + 1):
            if later not in expected:
                choose(later)
        row = result.metrics[step]
        assert row["rollout/measured"] == len(means)
        assert row["rollout/in_band"] == pytest.approx(fmean(LOW <= mean <= HIGH for mean in means.values()))
    assert filled > 0
    assert any(mean is None for step in range(1, 10) for mean in asked(result.path, step).values())


@pytest.mark.long
@pytest.mark.parametrize("overrides", [(), ("rollout.max_staleness=2",)], ids=["now", "ahead"])
def test_a_resumed_run_samples_the_same_problems(tmp_path, sums, overrides):
    whole = rlzoo.train(config("whole", *overrides))
    interrupted(config("stopped", *overrides), 5)
    state = json.loads((tmp_path / "stopped/checkpoints/step-000004/state/state.json").read_text())
    assert len(state["measured"]) == whole.metrics[4]["rollout/measured"] > 10
    with resumes_after(4, tmp_path / "stopped"):
        resumed = rlzoo.train(config("stopped", *overrides), resume=True)
    assert without_times(resumed.metrics) == without_times(whole.metrics)
    last = [load_file(run.path / "checkpoints" / "step-000009" / "model.safetensors") for run in (resumed, whole)]
    assert all(torch.equal(last[0][name], last[1][name]) for name in last[1])


@pytest.mark.long
def test_a_killed_run_samples_the_same_problems(tmp_path, sums, zygote):
    overrides = ("rollout.max_staleness=1", "learner.lr=1e-3")
    whole = rlzoo.train(config("whole", *overrides))
    settings = [*(setting for setting in QUICK if not setting.startswith("task.")), *SETTINGS, *overrides]
    words = ["train", "--clip", "grpo", "--steps", "9", "--output", "killed", *(f"--set={setting}" for setting in settings)]
    process = zygote.start(*words, folder=tmp_path, files=(os.devnull, tmp_path / "log", tmp_path / "log"))
    metrics = tmp_path / "killed" / "metrics.jsonl"
    while process.poll() is None and not (metrics.is_file() and metrics.read_bytes().count(b"\n") > 6):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL, (tmp_path / "log").read_text()
    resumed = rlzoo.train(config("killed", *overrides), resume=True)
    assert without_times(resumed.metrics) == without_times(whole.metrics)


@pytest.mark.long
def test_a_step_that_fails_after_its_first_round_measures_nothing(tmp_path, sums):
    overrides = ("rollout.dynamic_sampling=2", "checkpoint.every=0", "rollout.group_size=2")
    whole = rlzoo.train(config("whole", *overrides, steps=4))
    rounds = [int(row["rollout/rounds"]) for row in whole.metrics[1:]]
    step = next(step for step in (3, 4) if rounds[step - 1] > 1)
    # the grader fails in the second round of this step
    (tmp_path / "broken").write_text(str(2 * NUMBER * (sum(rounds[: step - 1]) + 1)))
    with pytest.raises(RunError, match="grading failed"):
        rlzoo.train(config("failed", *overrides, steps=4))
    (tmp_path / "broken").unlink()
    state = json.loads((tmp_path / f"failed/checkpoints/step-{step - 1:06d}/state/state.json").read_text())
    assert {when for _, when in state["measured"].values()} == set(range(1, step))
    with resumes_after(step - 1, tmp_path / "failed"):
        resumed = rlzoo.train(config("failed", *overrides, steps=4), resume=True)
    assert without_times(resumed.metrics) == without_times(whole.metrics)


def test_a_band_that_no_run_can_use_is_refused(sums):
    usual = ["rollout.band=[0.2,0.8]"]
    for overrides, problem in (
        (["rollout.band=[0.8,0.2]"], r"rollout.band=\[0.8, 0.2\]: the first value is above the second"),
        (["rollout.band=[.nan,0.2]"], "rollout.band.0=nan: input should be a finite number"),
        ([*usual, "task=arithmetic"], "a list of at least rollout.num_prompts=32 problems, such as math_file"),
        ([*usual, "rollout.num_prompts=25"], "a list of at least rollout.num_prompts=25 problems"),
    ):
        task = [] if "task=arithmetic" in overrides else SETTINGS[3:]
        with pytest.raises(UserError, match=problem):
            RunConfig.compose(clip="grpo", overrides=[*task, *overrides])


def test_the_order_of_the_file(sums):
    task = RunConfig.compose(clip="grpo", overrides=[*SETTINGS[3:8], "task.order=file"]).task
    assert [problem.question for problem in task.train_problems(22, 4)] == ["5+8", "5+9", "2+4", "2+5"]
