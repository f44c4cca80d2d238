"""A whole run samples with vLLM, in process and with a server: every batch uses the weights of its version."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import rlzoo
from rlzoo import RunConfig
from rlzoo.journal.rollout_file import RolloutFile
from rlzoo.models.pretrained import load_pretrained
from tests.training.short import keep_weights

EMBEDDED = Path(rlzoo.__file__).parent / "models" / "assets" / "embedded"  # the same model with another name
QUICK = [
    "rollout.engine=vllm", "rollout.num_prompts=8", "rollout.group_size=4", "rollout.max_new_tokens=20",
    "task.num_operands_max=4", "eval.num_problems=20", "learner.lr=1e-3", "tracking.mlflow=false",
]  # fmt: skip
PLAYED = [
    "rollout.engine=vllm", "rollout.num_prompts=8", "rollout.group_size=4", "eval.num_problems=20", "learner.lr=1e-3",
    "tracking.mlflow=false",
]  # fmt: skip


def train(folder, *overrides, options=(), quick=QUICK):
    """Run `rlzoo train` for two steps in a separate process; returns the run directory."""
    settings = [word for override in (*quick, *overrides) for word in ("--set", override)]
    command = [
        sys.executable,
        "-m",
        "rlzoo",
        "train",
        "--clip",
        "grpo",
        "--steps",
        "2",
        "--output",
        folder / "run",
        *settings,
        *options,
    ]
    answer = subprocess.run(
        [str(word) for word in command], cwd=folder, env=dict(os.environ), capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert "Traceback" not in answer.stderr
    return folder / "run"


def play(folder, *overrides, options=()):
    """Do the same for the game that ships with the package."""
    return train(folder, *overrides, options=("--config", "guess", *options), quick=PLAYED)


def check(run):
    """Check that the sampler's log-probs are the trainer's before each step's first update, and that the weights changed."""
    responses = []
    for step, version in ((1, 0), (2, 4)):  # four optimizer steps per batch
        rows = [json.loads(line) for line in (run / "rollouts" / f"{step:06d}.jsonl").read_text().splitlines()]
        tensors = load_file(run / "rollouts" / f"{step:06d}.safetensors")
        assert len(rows) == 32
        assert {row["policy_version"] for row in rows} == {version}
        torch.testing.assert_close(tensors["old_log_probs"], tensors["rollout_log_probs"], atol=1e-4, rtol=0)
        responses.append([row["response"] for row in rows])
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics] == [0, 1, 2]
    assert metrics[0]["eval/accuracy"] > 0.2
    assert metrics[1]["ratio/log_ratio_max"] > 0.01  # so the second batch has other weights
    return responses


@pytest.mark.parametrize("overrides", [(), ("learner.lora.rank=8", "learner.lr=1e-2")], ids=["all weights", "lora"])
def test_a_run_in_process(tmp_path, overrides):
    check(train(tmp_path, *overrides))


def test_runs_against_a_server_start_from_their_initial_weights(tmp_path, embedded_server):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    server = check(train(tmp_path / "one", f"rollout.vllm.server={embedded_server}"))
    # the server has the first run's final weights, and the second run starts from the model's again
    again = check(train(tmp_path / "two", f"rollout.vllm.server={embedded_server}"))
    assert server[0] == again[0]


@pytest.mark.parametrize("key", ["rollout.vllm.dtype=bfloat16", "rollout.vllm.max_model_len=300", f"model.path={EMBEDDED}"])
def test_an_incompatible_server_is_reported_in_one_line(tmp_path, embedded_server, key):
    command = [sys.executable, "-m", "rlzoo", "train", "--clip", "grpo", "--set", "rollout.engine=vllm", "--set", key]
    command += ["--set", f"rollout.vllm.server={embedded_server}"]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert answer.returncode == 2
    questions, error = answer.stderr.splitlines()
    assert questions.startswith("task arithmetic: endless training questions")
    assert error.startswith(f"rlzoo: rollout.vllm.server='{embedded_server}': ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["in process", "server"])
def test_two_processes_sample_the_same_as_one_process(tmp_path, where, request):
    server = [] if where == "in process" else [f"rollout.vllm.server={request.getfixturevalue('embedded_server')}"]
    runs = []
    for name, options in (("one", ()), ("two", ("--processes", "2"))):
        (tmp_path / name).mkdir()
        runs.append(train(tmp_path / name, "rollout.num_prompts=7", *server, options=options))
    for step in ("000001", "000002"):
        texts = [
            [json.loads(line)["response"] for line in (run / "rollouts" / f"{step}.jsonl").read_text().splitlines()]
            for run in runs
        ]
        assert len(texts[0]) == 28
        assert texts[0] == texts[1]
    one, two = ([json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in runs)
    for name in ("learner/grad_norm", "learner/objective", "eval/accuracy"):
        assert two[2][name] == pytest.approx(one[2][name], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("where", ["in process", "server"])
def test_one_batch_ahead_is_sampled_with_the_previous_weights(tmp_path, where, request):
    server = [] if where == "in process" else [f"rollout.vllm.server={request.getfixturevalue('embedded_server')}"]
    run = train(tmp_path, "rollout.max_staleness=1", *server)
    rows = [json.loads(line) for line in (run / "rollouts" / "000002.jsonl").read_text().splitlines()]
    assert {row["policy_version"] for row in rows} == {0}
    tensors = load_file(run / "rollouts" / "000002.safetensors")
    assert float((tensors["old_log_probs"] - tensors["rollout_log_probs"]).abs().max()) > 1e-2
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["rollout/staleness"] for row in metrics[1:]] == [0.0, 4.0]


def check_episodes(run):
    """Check that responses contain tokens of the model and the game, and that the log-probs of the model's tokens agree."""
    responses = check(run)
    for step in (1, 2):
        rows = [json.loads(line) for line in (run / "rollouts" / f"{step:06d}.jsonl").read_text().splitlines()]
        recorded = RolloutFile.load(run / "rollouts" / f"{step:06d}.safetensors")
        prompts, behind = recorded.prompt_lengths.tolist(), recorded.sequence_lengths - recorded.prompt_lengths
        assert [row["turns"][-1]["end"] for row in rows] == behind.tolist()
        assert [row["length"] for row in rows] == recorded.lengths.tolist()
        assert len(recorded.rollout_log_probs) == int(recorded.lengths.sum()) < int(behind.sum())
        masks = recorded.response_mask.split(recorded.sequence_lengths.tolist())
        numbers = recorded.turn_ids.split(recorded.lengths.tolist())
        for row, mask, number, prompt in zip(rows, masks, numbers, prompts, strict=True):
            chosen = mask[prompt:].nonzero()[:, 0].tolist()
            spans = [(place, index) for index, turn in enumerate(row["turns"]) for place in range(turn["start"], turn["end"])]
            assert list(zip(chosen, number.tolist(), strict=True)) == spans
        assert max(len(row["turns"]) for row in rows) > 6
        assert not any("failure" in row for row in rows)
    return responses


@pytest.mark.parametrize("where", ["in process", "server"])
def test_a_run_on_episodes(tmp_path, where, request):
    server = [] if where == "in process" else [f"rollout.vllm.server={request.getfixturevalue('playing_server')}"]
    check_episodes(play(tmp_path, *server))


@pytest.mark.parametrize("where", ["in process", "server"])
def test_two_processes_play_the_same_episodes_as_one_process(tmp_path, where, request):
    server = [] if where == "in process" else [f"rollout.vllm.server={request.getfixturevalue('playing_server')}"]
    runs = []
    for name, options in (("one", ()), ("two", ("--processes", "2"))):
        (tmp_path / name).mkdir()
        runs.append(play(tmp_path / name, *server, options=options))
    one, two = map(check_episodes, runs)
    assert one == two
    one, two = ([json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in runs)
    for name in ("learner/grad_norm", "learner/objective", "eval/accuracy", "env/turns_mean"):
        assert two[2][name] == pytest.approx(one[2][name], rel=1e-3, abs=1e-6)


def test_weights_updated_in_flight_are_known_for_every_token(tmp_path, embedded_server, monkeypatch):
    """Every token's log-prob matches the weights of its version, even if one response has several versions."""
    overrides = [
        f"rollout.vllm.server={embedded_server}", "rollout.max_staleness=4", "rollout.vllm.in_flight=true",
        "rollout.max_new_tokens=200", "rollout.temperature=1.5", "rollout.batch_size=1", "task.num_operands_max=9",
        "checkpoint.every=0",  # a checkpoint would wait for the queue
    ]  # fmt: skip
    kept = keep_weights(monkeypatch)
    run = rlzoo.train(RunConfig.compose(clip="grpo", overrides=[*QUICK, *overrides], steps=10, output=tmp_path / "run")).path
    steps = [RolloutFile.load(run / "rollouts" / f"{number:06d}.safetensors") for number in range(1, 11)]
    weights = {step.learner_version: kept[step.step] for step in steps if step.step in kept}
    model, _ = load_pretrained("embedded")
    num_mixed, worst = 0, 0.0
    for number, step in enumerate(steps):
        per_token = len(step.policy_versions) == int(step.lengths.sum())
        every = step.policy_versions if per_token else step.policy_versions.repeat_interleave(step.lengths)
        versions = every.split(step.lengths.tolist())
        assert int(every.min()) >= steps[max(0, number - 4)].learner_version
        assert int(every.max()) <= step.learner_version
        num_mixed += sum(len(row.unique()) > 1 for row in versions)
        for version in sorted(set(every.tolist())):
            model.load_state_dict(weights[version], strict=False)
            sequences = step.token_ids.split(step.sequence_lengths.tolist())
            for ids, reported, row in zip(
                sequences, step.rollout_log_probs.split(step.lengths.tolist()), versions, strict=True
            ):
                with torch.no_grad():
                    logits = model(input_ids=ids[None]).logits[0].float() / 1.5
                rescored = logits.log_softmax(-1)[:-1].gather(-1, ids[1:, None])[-len(reported) :, 0]
                worst = max([worst, *(rescored - reported)[row == version].abs().tolist()])
    assert worst < 1e-4
    assert num_mixed > 0, "the test needs responses that were updated in flight"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(row["rollout/staleness_max"] for row in metrics[1:]) > 4
