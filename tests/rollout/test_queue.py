"""A queue of batches that are sampled ahead: which weights sampled what, rollback, failures and stopping."""

import itertools
import json
import os
import signal
import threading
import time

import pytest
import torch
from safetensors.torch import load_file

import rlzoo
from rlzoo import RunConfig, UserError
from rlzoo.core.errors import RunError
from rlzoo.gate.settings import Start, check_settings
from rlzoo.journal.rollout_file import RolloutFile
from rlzoo.models.pretrained import load_pretrained
from rlzoo.rollout.sampler import HFSampler
from tests.off_policy import plain_log_probs
from tests.training.short import interrupted, keep_weights, lines, quick, resumes_after, without_times

pytestmark = pytest.mark.usefixtures("interrupts")
AHEAD = 3
SETTINGS = [f"rollout.max_staleness={AHEAD}", "tracking.mlflow=false", "checkpoint.every=1", "checkpoint.keep=9"]


def config(folder, *overrides, steps=7, clip="fspo"):
    return quick(folder, clip=clip, steps=steps, overrides=[*SETTINGS, "rollout.num_prompts=4", *overrides])


@pytest.fixture(scope="module")
def queued_and_weights(tmp_path_factory):
    """A run, and its weights before the first update of each step."""
    update, done = HFSampler.update_weights, []

    def late(self, weights, version=0):  # loads copied weights when the learner has changed its own
        number, end = len(done), time.monotonic() + 1  # an evaluation waits for the queue, so do not wait for it
        while threading.current_thread() is not threading.main_thread() and len(done) == number and time.monotonic() < end:
            time.sleep(0.01)
        update(self, weights, version)

    # the evaluation after step 4 uses the sampler between two batches
    overrides = ("eval.every=4", "checkpoint.every=4", "learner.lr=1e-3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HFSampler, "update_weights", late)
        weights = keep_weights(patch)
        run = config(tmp_path_factory.mktemp("queue") / "run", *overrides)
        return rlzoo.train(run, observer=lambda step, metrics: done.append(step)), weights


@pytest.fixture(scope="module")
def queued(queued_and_weights):
    return queued_and_weights[0]


def recorded(result, step):
    return RolloutFile.load(result.path / "rollouts" / f"{step:06d}.safetensors")


@pytest.mark.long
def test_the_batch_of_a_step_is_sampled_with_the_weights_of_the_schedule(queued_and_weights):
    (queued, weights), (model, _) = queued_and_weights, load_pretrained("embedded")
    versions = [recorded(queued, number).learner_version for number in range(1, 8)]  # after step 0, 1, ...
    assert versions == sorted(set(versions)), "the test needs steps with updates"
    for number in range(1, 8):
        step, after = recorded(queued, number), max(0, number - 1 - AHEAD)
        version = versions[after]
        assert set(step.policy_versions.tolist()) == {version}
        assert queued.metrics[number]["rollout/staleness"] == versions[number - 1] - version
        assert queued.metrics[number]["rollout/staleness_max"] == versions[number - 1] - version
        model.load_state_dict(weights[after + 1], strict=False)
        sequences = step.token_ids.split(step.sequence_lengths.tolist())
        sizes = step.lengths.tolist()
        with torch.no_grad():
            rescored = torch.cat([plain_log_probs(model, *row) for row in zip(sequences, sizes, strict=True)])
        # rounding reaches 1.6e-5 on some processors; other weights differ by more than 1e-3
        assert float((rescored - step.rollout_log_probs).abs().max()) < 1e-4
        if number > 1:  # the step's own weights differ
            assert float((step.old_log_probs - step.rollout_log_probs).abs().max()) > 1e-3


@pytest.mark.long
def test_evaluations_use_the_newest_weights(queued, tmp_path):
    """A run without a queue from the weights after step 4 evaluates to the same number."""
    folder = queued.path / "checkpoints" / "step-000004"
    overrides = ["rollout.max_staleness=0", "rollout.num_prompts=4", "tracking.mlflow=false", f"model.path={folder}"]
    plain = rlzoo.train(quick(tmp_path / "run", steps=1, overrides=overrides))
    assert plain.metrics[0]["eval/accuracy"] == queued.metrics[4]["eval/accuracy"]


@pytest.mark.long
def test_a_run_with_a_queue_and_dynamic_sampling_resumes_bit_for_bit(tmp_path):
    overrides = ("checkpoint.every=2", "eval.num_problems=0", "rollout.dynamic_sampling=3")
    whole = rlzoo.train(config(tmp_path / "whole", *overrides))
    interrupted(config(tmp_path / "stopped", *overrides), 5)
    state = json.loads((tmp_path / "stopped" / "checkpoints" / "step-000004" / "state" / "state.json").read_text())
    assert [len(batch["rollouts"]) for batch in state["queue"]] == [16, 16, 16]
    with resumes_after(4, tmp_path / "stopped"):
        resumed = rlzoo.train(config(tmp_path / "stopped", *overrides), resume=True)
    assert without_times(resumed.metrics) == without_times(whole.metrics)
    for step in (5, 6, 7):
        got, expected = recorded(resumed, step), recorded(whole, step)
        assert torch.equal(got.token_ids, expected.token_ids)
        assert torch.equal(got.policy_versions, expected.policy_versions)
    last = [load_file(result.path / "checkpoints" / "step-000007" / "model.safetensors") for result in (resumed, whole)]
    assert all(last[0][name].equal(last[1][name]) for name in last[1])


@pytest.mark.long
def test_dynamic_sampling_uses_the_newest_weights_and_repeats_no_question(tmp_path):
    settings = config(tmp_path / "run", "rollout.dynamic_sampling=1", "eval.num_problems=0", "rollout.group_size=2")
    result = rlzoo.train(settings)
    rounds = [int(row["rollout/rounds"]) for row in result.metrics[1:]]
    assert max(rounds[AHEAD + 1 :]) == 2, "the test needs a batch with a second round"
    for number, count in enumerate(rounds, start=1):
        step, then = recorded(result, number), recorded(result, max(1, number - AHEAD)).learner_version
        allowed = {then, step.learner_version} if count == 2 else {then}
        assert set(step.policy_versions.tolist()) <= allowed
    questions = [{row["question"] for row in lines(result.path / "rollouts" / f"{step:06d}.jsonl")} for step in range(1, 8)]
    assert not any(one & other for one, other in itertools.combinations(questions, 2))


@pytest.mark.long
def test_a_rollback_drops_what_the_discarded_weights_sampled(tmp_path, monkeypatch):
    from rlzoo.training import after_step

    def is_spike(metrics, before, limit):
        return len(before) == 4 and limit is not None  # after step 4

    monkeypatch.setattr(after_step, "is_spike", is_spike)
    overrides = ("checkpoint.every=2", "eval.num_problems=0", "learner.rollback_above=2.0")
    result = rlzoo.train(config(tmp_path / "run", *overrides, steps=6))
    assert result.metrics[4]["learner/rolled_back"] == 1.0
    versions = [set(recorded(result, step).policy_versions.tolist()) for step in (4, 5, 6)]
    assert versions == [
        {0},
        {8},
        {8},
    ]  # step 5 begins with the weights after step 2
    questions = [{row["question"] for row in lines(result.path / "rollouts" / f"{step:06d}.jsonl")} for step in range(1, 7)]
    assert not any(one & other for one, other in itertools.combinations(questions, 2))


@pytest.mark.long
def test_a_failed_batch_ends_the_run_once_when_needed_and_can_be_resampled(tmp_path, monkeypatch, caplog):
    draw, calls = HFSampler.draw, []

    def failing(self, rows, draws):
        if threading.current_thread() is not threading.main_thread():
            calls.append(draws.seed)
            if len(calls) >= 4:  # the batch of step 5, whose sampling begins in step 2
                raise RunError("the sampler is gone")
        return draw(self, rows, draws)

    settings = config(tmp_path / "run", "eval.num_problems=0", "checkpoint.every=0")
    with monkeypatch.context() as patch:
        patch.setattr(HFSampler, "draw", failing)
        with pytest.raises(RunError, match="the sampler is gone") as error:
            rlzoo.train(settings)
    assert "step 5 (everything so far" in str(error.value.__notes__)
    assert len(calls) == 4, "batches behind a failed one are not sampled"
    assert not caplog.records or "the sampler is gone" not in caplog.text
    with resumes_after(4, tmp_path / "run"):
        result = rlzoo.train(settings, resume=True)
    assert [row["step"] for row in lines(result.path / "metrics.jsonl")] == list(range(8))
    step = recorded(result, 5)
    assert set(step.policy_versions.tolist()) == {step.learner_version}  # sampled by the weights that it was resumed with


@pytest.mark.long
def test_a_run_stopped_by_a_signal_resumes_as_if_uninterrupted(queued, tmp_path):
    settings = ("eval.every=4", "checkpoint.every=4", "learner.lr=1e-3")

    def interrupt(step, metrics):
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        rlzoo.train(config(tmp_path / "run", *settings), interrupt)
    with resumes_after(3, tmp_path / "run"):
        result = rlzoo.train(config(tmp_path / "run", *settings), resume=True)
    assert without_times(result.metrics) == without_times(queued.metrics)


def test_a_queue_weights_stale_responses_unless_that_is_switched_off(caplog):
    def correction(clip, *overrides):
        given = RunConfig.compose(clip=clip, overrides=overrides).correction
        return given and (given.name, given.pool)

    assert correction("grpo", "rollout.max_staleness=2") == ("tis", "token")
    assert correction("fspo", "rollout.max_staleness=2") == ("tis", "sum")
    assert correction("dppo-tv", "rollout.max_staleness=2") is None  # its ratio is relative to the sampler
    assert correction("grpo", "rollout.max_staleness=2", "correction=none") is None
    assert correction("grpo", "rollout.max_staleness=1") is None
    assert correction("grpo", "rollout.max_staleness=1", "correction=tis") == ("tis", "token")


def test_the_correction_of_a_queue_round_trips_through_yaml(tmp_path):
    for name, overrides in (("on", ()), ("off", ("correction=none",))):
        run = RunConfig.compose(clip="grpo", overrides=["rollout.max_staleness=4", *overrides])
        (tmp_path / f"{name}.yaml").write_text(run.to_yaml())
        assert RunConfig.compose([tmp_path / f"{name}.yaml"]).correction == run.correction


def test_several_processes_do_not_share_a_server_behind_a_queue(tmp_path):
    server = ["rollout.engine=vllm", "rollout.vllm.server=http://127.0.0.1:1", "rollout.max_staleness=2"]
    with pytest.raises(UserError, match=r"rollout.max_staleness=2: with a vLLM server, 2 processes would change its weights"):
        check_settings(quick(tmp_path / "run", overrides=server), Start(2))
