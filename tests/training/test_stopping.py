"""What stops a run: a signal, after the current step; files that cannot be written; and gradients that stay infinite."""

import json
import logging
import os
import re
import resource
import signal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import rlzoo
from rlzoo.core.errors import RunError
from rlzoo.training import stopping
from tests.training.short import QUICK, lines, quick, resumes_after, without_times

pytestmark = pytest.mark.usefixtures("interrupts")
OVERRIDES = ["tracking.mlflow=false", "checkpoint.every=0", "eval.num_problems=0"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The uninterrupted run."""
    return rlzoo.train(quick(tmp_path_factory.mktemp("whole") / "run", steps=4, overrides=OVERRIDES))


def config(folder):
    return quick(folder / "run", steps=4, overrides=OVERRIDES)


def at_step(number, act):
    """An observer that acts once."""
    return lambda step, metrics: act() if step == number else None


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)], ids=["Ctrl-C", "SIGTERM"]
)
@pytest.mark.parametrize("step", [pytest.param(0, marks=pytest.mark.long), 2])
def test_a_signal_ends_the_run_after_the_step_and_nothing_is_lost(number, error, step, whole, tmp_path, caplog):
    def stop():
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # a terminal and a launcher may both forward it

    with pytest.raises(error) as raised:
        rlzoo.train(config(tmp_path), at_step(step, stop))
    if error is SystemExit:
        assert raised.value.code == 143
    assert [row["step"] for row in lines(tmp_path / "run" / "metrics.jsonl")] == list(range(step + 1))
    assert f"stopped after step {step} of 4; resume with: rlzoo train --resume --output {tmp_path}/run" in caplog.text
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["finished"] is False
    with resumes_after(step, tmp_path / "run"):
        result = rlzoo.train(config(tmp_path), resume=True)
    assert without_times(result.metrics) == without_times(whole.metrics)


def test_a_second_signal_ends_it_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(stopping, "ONE_PRESS", -1.0)
    reached = []

    def stop():
        os.kill(os.getpid(), signal.SIGINT)
        reached.append("the first")
        os.kill(os.getpid(), signal.SIGINT)
        reached.append("the second")

    with pytest.raises(KeyboardInterrupt):
        rlzoo.train(config(tmp_path), at_step(2, stop))
    assert reached == ["the first"]


@pytest.mark.long
def test_a_run_finishes_despite_a_signal_in_its_last_step(tmp_path):
    result = rlzoo.train(config(tmp_path), at_step(4, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert json.loads((result.path / "summary.json").read_text())["finished"] is True


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_command_exits_with_128_plus_the_signal_number(number, code, zygote, tmp_path):
    settings = [word for override in [*QUICK, *OVERRIDES] for word in ("--set", override)]
    words = ["train", "--clip", "fspo", "--steps", "500", "--output", tmp_path / "run", *settings]
    output, errors = tmp_path / "output", tmp_path / "errors"
    os.mkfifo(output)
    process = zygote.start(*words, folder=tmp_path, files=(os.devnull, output, errors))
    with output.open() as printed:
        assert any(line.startswith("step 2/") for line in printed)
        process.send_signal(number)
        assert process.wait(120) == code
    errors = errors.read_text()
    assert f"resume with: rlzoo train --resume --output {tmp_path / 'run'}" in errors
    assert "Traceback" not in errors
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert (saved / "model.safetensors").is_file()
    assert (
        lines(tmp_path / "run" / "metrics.jsonl")[-1]["step"]
        == json.loads((saved / "state" / "state.json").read_text())["step"]
    )


@pytest.mark.long
def test_a_full_disk_stops_the_run_and_loses_nothing(whole, tmp_path):
    metrics = tmp_path / "run" / "metrics.jsonl"

    def fill():
        metrics.rename(tmp_path / "aside")
        metrics.symlink_to("/dev/full")  # every write fails with no space left

    with pytest.raises(
        RunError, match=r"step 3: No space left on device.*; once that is fixed, resume with: rlzoo train --resume"
    ):
        rlzoo.train(config(tmp_path), at_step(2, fill))
    metrics.unlink()
    (tmp_path / "aside").rename(metrics)
    with resumes_after(0, tmp_path / "run"):
        result = rlzoo.train(config(tmp_path), resume=True)
    assert without_times(result.metrics) == without_times(whole.metrics)


@pytest.mark.long
def test_a_checkpoint_that_does_not_fit_stops_the_run_and_damages_no_other(whole, tmp_path, caplog):
    every_two = quick(tmp_path / "run", steps=4, overrides=[*OVERRIDES, "checkpoint.every=2"])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill():
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))  # bytes; the weights take more

    try:
        with pytest.raises(RunError, match=r"step 4: .*File too large"):
            rlzoo.train(every_two, at_step(3, fill))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("s*")] == ["step-000002"]
    with resumes_after(2, tmp_path / "run"):
        result = rlzoo.train(every_two, resume=True)
    assert without_times(result.metrics) == without_times(whole.metrics)
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))


def test_gradients_that_stay_infinite_end_the_run(tmp_path):
    overrides = [*OVERRIDES, "learner.max_nonfinite=6"]

    from rlzoo.learner import learner as module

    apply = module.Learner.accumulate

    def infinite(self, *arguments, **options):
        measures = apply(self, *arguments, **options)
        next(self.model.parameters()).grad[0] = torch.inf
        return measures

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.Learner, "accumulate", infinite)
        with pytest.raises(RunError, match=r"the gradient was not finite in 6 consecutive updates \(learner.max_nonfinite\)"):
            rlzoo.train(quick(tmp_path / "run", steps=4, overrides=overrides))
    rows = lines(tmp_path / "run" / "metrics.jsonl")
    assert [row.get("learner/nonfinite") for row in rows] == [None, 1.0]  # four updates of the first step


@pytest.mark.long
def test_a_gradient_spike_rolls_back_the_weights(tmp_path, caplog):
    def config(name, steps):
        overrides = [*OVERRIDES, "checkpoint.every=5", "checkpoint.keep=9", "learner.rollback_above=1.0"]
        return quick(
            tmp_path / name, steps=steps, overrides=[setting for setting in overrides if setting != "checkpoint.every=0"]
        )

    rows = rlzoo.train(config("long", 16)).metrics
    spike = next(step for step, row in enumerate(rows) if row.get("learner/rolled_back"))
    norms = [row["learner/grad_norm"] for row in rows[1:]]
    assert spike > 10
    assert norms[spike - 1] > np.median(norms[: spike - 1])
    newest = (spike - 1) // 5 * 5
    assert f"step {spike}: gradient spike; restored the weights from step {newest}" in caplog.text
    short = rlzoo.train(config("short", spike))
    assert without_times(short.metrics)[:spike] == without_times(rows)[:spike]
    for file in ("model.safetensors", "state/optimizer.safetensors"):
        before, after = (load_file(short.path / "checkpoints" / f"step-{step:06d}" / file) for step in (newest, spike))
        assert all(before[name].equal(after[name]) for name in before)
    asked = [
        {text["question"] for text in lines(short.path / "rollouts" / f"{step:06d}.jsonl")} for step in (newest + 1, spike)
    ]
    assert asked[0] != asked[1] or newest + 1 == spike, "it goes on with other data"


@pytest.mark.long
def test_a_run_resumed_before_a_spike_equals_an_uninterrupted_run(tmp_path):
    def config(name):
        overrides = ["tracking.mlflow=false", "eval.num_problems=0", "checkpoint.every=5", "checkpoint.keep=1"]
        return quick(tmp_path / name, steps=16, overrides=[*overrides, "learner.rollback_above=1.0"])

    rows = rlzoo.train(config("whole")).metrics
    before_spikes = [step - 1 for step, row in enumerate(rows) if row.get("learner/rolled_back") and step % 5 != 1]
    assert before_spikes, "the test needs steps between the checkpoint and a spike"
    for number, step in enumerate(before_spikes[:3]):
        with pytest.raises(KeyboardInterrupt):
            rlzoo.train(config("stopped"), at_step(step, lambda: os.kill(os.getpid(), signal.SIGINT)), resume=number > 0)
    with resumes_after(before_spikes[:3][-1], tmp_path / "stopped"):
        result = rlzoo.train(config("stopped"), resume=True)
    assert without_times(result.metrics) == without_times(rows)
    for file in ("model.safetensors", "state/optimizer.safetensors"):
        got, expected = (load_file(tmp_path / name / "checkpoints" / "step-000016" / file) for name in ("stopped", "whole"))
        assert all(got[name].equal(expected[name]) for name in expected)


@pytest.mark.long
def test_a_run_stopped_at_a_spike_while_sampling_ahead_can_be_resumed(tmp_path):
    def config(name):
        overrides = ["tracking.mlflow=false", "eval.num_problems=0", "checkpoint.every=5", "checkpoint.keep=1"]
        overrides += ["learner.rollback_above=1.0", "rollout.max_staleness=1"]
        return quick(tmp_path / name, steps=16, overrides=overrides)

    rows = rlzoo.train(config("whole")).metrics
    spikes = [step for step, row in enumerate(rows) if row.get("learner/rolled_back") and step < 16]
    assert spikes, "the test needs a spike"
    assert min(row["rollout/staleness"] for row in rows[1:]) >= 0
    for number, step in enumerate(spikes[:2]):
        with pytest.raises(KeyboardInterrupt):
            rlzoo.train(config("stopped"), at_step(step, lambda: os.kill(os.getpid(), signal.SIGINT)), resume=number > 0)
    with resumes_after(spikes[:2][-1], tmp_path / "stopped"):
        result = rlzoo.train(config("stopped"), resume=True)
    assert without_times(result.metrics) == without_times(rows)


REWARD = """
import time

def pay(problem, response):
    number = sum(response.encode()) % 10
    if number < {failing}:
        if number % 2:
            time.sleep(600)
        raise KeyError("no such response")
    return number / 10
"""


def rewarded(folder, monkeypatch, name, failing):
    (folder / f"{name}.py").write_text(REWARD.format(failing=failing))
    monkeypatch.chdir(folder)
    overrides = [*OVERRIDES, f"task.reward={name}:pay", "task.timeout=0.2", "rollout.num_prompts=4"]
    return quick(folder / "run", steps=2, overrides=overrides)


@pytest.mark.long
def test_a_reward_that_occasionally_hangs_or_crashes_is_tolerated(tmp_path, monkeypatch, caplog):
    result = rlzoo.train(rewarded(tmp_path, monkeypatch, "unsteady_reward", failing=2))
    rows = lines(result.path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        texts = lines(result.path / "rollouts" / f"{row['step']:06d}.jsonl")
        numbers = [sum(text["response"].encode()) % 10 for text in texts]
        assert [text["reward"] for text in texts] == [None if number < 2 else number / 10 for number in numbers]
        assert row["reward/failed"] == sum(number < 2 for number in numbers) / len(numbers)
    assert sum(row["reward/failed"] for row in rows[1:]) > 0
    reports = [message for message in caplog.messages if "the last failure" in message]
    assert len(reports) == 1
    assert re.search(r"gradings failed; the last failure: (KeyError|took longer)", reports[0])


@pytest.mark.long
def test_a_reward_that_mostly_fails_ends_the_run_with_its_reason(tmp_path, monkeypatch):
    with pytest.raises(
        RunError,
        match=r"grading failed for \d+ of 16 responses \(reward.max_failed=0.5\); the last failure: (KeyError|took longer)",
    ):
        rlzoo.train(rewarded(tmp_path, monkeypatch, "broken_reward", failing=10))


def test_stopping_is_logged(caplog):
    caplog.set_level(logging.INFO, "rlzoo")

    def stopped():
        with stopping.requested_stop() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            stop.end("over")

    with pytest.raises(SystemExit):
        stopped()
    assert [record.getMessage() for record in caplog.records] == [
        "stopping after this step; interrupt again to stop at once",
        "over",
    ]
