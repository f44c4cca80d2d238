"""A whole run on the shipped model: its files, its reproducibility, and how it ends."""

import contextlib
import json
import logging
import math
import shutil
from importlib.metadata import version

import mlflow
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import rlzoo
from rlzoo import RunConfig, load_zoo
from rlzoo.core.errors import RunError
from rlzoo.gate.enter import enter
from rlzoo.journal.rollout_file import RolloutFile
from rlzoo.journal.state import read_fingerprint
from rlzoo.training.loop import steps
from rlzoo.training.run import Run
from tests.training.short import interrupted, lines, make_teacher, quick, without_times


@pytest.fixture(scope="module")
def run(tmp_path_factory, empty_store):
    """A run of two steps, shared by the tests that check its files."""
    folder = tmp_path_factory.mktemp("run")
    shutil.copy(empty_store, folder / "mlflow.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
        patch.chdir(folder)
        seen = []
        result = rlzoo.train(quick(folder / "out"), lambda step, metrics: seen.append((step, metrics)))
    return folder, result, seen


def test_metrics_are_written_and_reported_immediately(run):
    _, result, seen = run
    rows = lines(result.path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [step for step, _ in seen] == [0, 1, 2]
    assert rows == result.metrics
    assert {"step", "eval/accuracy", "eval/accuracy_se", "eval/failed", "time/clock"} == set(result.metrics[0])
    assert all(math.isfinite(value) for row in rows for value in row.values())
    expected = {
        "reward/mean", "reward/std", "reward/zero_std_groups", "eval/accuracy", "response/length_mean", "response/truncated",
        "clip/fraction", "clip/fraction_low", "clip/fraction_high", "clip/fraction_dual", "clip/fraction_length_bin_0",
        "fairness/lre_max", "fairness/lre_mean", "fairness/ess", "fairness/ess_length_bin_0", "ratio/mu_token",
        "ratio/sigma_token", "ratio/log_ratio_min", "ratio/log_ratio_max", "learner/grad_norm", "learner/loss",
        "learner/entropy", "learner/lr", "throughput/tokens_per_second", "time/rollout", "time/learner",
    }  # fmt: skip
    assert expected <= set(result.metrics[-1])


@pytest.mark.parametrize(
    ("overrides", "moved"),
    [
        ((), ["trained"]),
        (("rollout.max_staleness=1",), ["trained", "copy"]),
        (("launch.fsdp=true",), ["copy"]),  # sharding moves the trained model
    ],
    ids=["shared", "ahead", "sharded"],
)
def test_models_are_on_their_device_before_anything_else_is_built(overrides, moved, tmp_path, monkeypatch):
    devices = []
    move = PreTrainedModel.to

    def recorded(model, *args, **kwargs):
        devices.append((id(model), args))
        return move(model, *args, **kwargs)

    monkeypatch.setattr(PreTrainedModel, "to", recorded)
    config = quick(tmp_path / "out", overrides=["tracking.mlflow=false", *overrides])
    run = Run(enter(config, config.task))
    run.rollouts.close()
    run.directory.close()
    names = {id(run.model): "trained", id(run.rollouts.sampler.model): "copy" if "copy" in moved else "trained"}
    assert [names[model] for model, _ in devices] == moved
    assert {args for _, args in devices} == {(run.accelerator.device,)}


def test_every_step_compares_the_sampler_with_the_learner(run):
    _, result, _ = run
    assert all(0 < row["mismatch/log_ratio_abs_mean"] < 1e-5 for row in result.metrics[1:])


@pytest.mark.parametrize(("factor", "precision", "ends"), [(2.0, "float32", True), (1.0, "bfloat16", False)])
def test_a_sampler_with_equal_weights_but_different_log_probs_ends_the_run(factor, precision, ends, tmp_path):
    config = quick(tmp_path / "out", overrides=["tracking.mlflow=false", f"model.dtype={precision}"], steps=1)
    run = Run(enter(config, config.task))
    head = run.model.get_output_embeddings()
    head.register_forward_pre_hook(lambda _, inputs: (inputs[0] * factor,) if torch.is_grad_enabled() else None)
    before = {name: weight.clone() for name, weight in run.model.named_parameters()}
    problem = pytest.raises(RunError, match=r"step 1: .* differ from the learner's by [\d.]+ nats per token .* at most 0.005")
    with problem if ends else contextlib.nullcontext():
        list(steps(run))
    run.rollouts.close()
    run.directory.close()
    assert all(torch.equal(weight, before[name]) for name, weight in run.model.named_parameters()) == ends


def test_config_yaml_reproduces_the_run(run, tmp_path):
    _, result, _ = run
    again = RunConfig.compose([result.path / "config.yaml"], overrides=["tracking.mlflow=false"], output=tmp_path / "again")
    repeated = rlzoo.train(again)
    assert without_times(repeated.metrics) == without_times(result.metrics)
    first, second = (
        load_file(path / "checkpoints" / "step-000002" / "model.safetensors") for path in (result.path, repeated.path)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_rollouts_are_recorded_for_reading_and_for_replay(run):
    _, result, _ = run
    texts = lines(result.path / "rollouts" / "000002.jsonl")
    step = RolloutFile.load(result.path / "rollouts" / "000002.safetensors")
    assert len(texts) == len(step) == 32
    assert [text["length"] for text in texts] == step.lengths.tolist()
    assert [text["reward"] for text in texts] == step.rewards.tolist()
    assert [text["policy_version"] for text in texts] == step.policy_versions.tolist()
    assert {text["policy_version"] for text in texts} == {4}  # four optimizer steps in step 1
    assert (step.step, step.num_steps, step.rule["name"], len(step.updates)) == (2, 2, "fspo", 4)
    torch.testing.assert_close(step.old_log_probs, step.rollout_log_probs, atol=1e-3, rtol=0)
    assert sorted(torch.cat([update.rows for update in step.updates]).tolist()) == list(range(32))
    assert sum(len(update.log_probs) for update in step.updates) == int(step.lengths.sum())
    for text in texts:
        right = text["response"].rpartition("#")[2] == text["answer"]
        assert text["reward"] == float(right)


def test_checkpoint_loads_in_plain_transformers(run):
    _, result, _ = run
    folder = result.path / "checkpoints" / "step-000002"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("3+5=", return_tensors="pt")["input_ids"]
    assert model(input_ids=ids).logits.shape[:2] == (1, 4)


def test_mlflow_has_parameters_metrics_tags_and_config(run):
    folder, result, _ = run
    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db")
    tracked = client.get_run(result.mlflow_run_id)
    assert tracked.info.status == "FINISHED"
    assert tracked.data.params["clip.name"] == "fspo"
    assert tracked.data.params["clip.width_high"] == "0.015"
    assert tracked.data.tags["clip_source"] == f"rlzoo-llm {version('rlzoo-llm')}"
    assert {key: tracked.data.tags[key] for key in ("rl_rule", "seed", "task", "model")} == {
        "rl_rule": "fspo", "seed": "0", "task": "arithmetic", "model": "embedded",
    }  # fmt: skip
    assert read_fingerprint(result.path)["training problems"].startswith(tracked.data.tags["questions"])
    history = client.get_metric_history(result.mlflow_run_id, "reward/mean")
    assert [(point.step, point.value) for point in history] == [(step, result.metrics[step]["reward/mean"]) for step in (1, 2)]
    artifacts = {item.path for item in client.list_artifacts(result.mlflow_run_id)}
    assert {"config.yaml", "completions.html", "metrics.jsonl"} <= artifacts


FEW = ("fspo", "fspo-adaptive", "grpo", "gvpo", "opd")
"""Rules that train in continuous integration."""


@pytest.mark.parametrize(
    "clip", [*FEW, *(pytest.param(name, marks=pytest.mark.long) for name in load_zoo() if name not in FEW)]
)
def test_every_bundled_policy_trains(clip, tmp_path):
    overrides = ["tracking.mlflow=false", "eval.num_problems=0"]
    overrides += [f"model.reference={make_teacher(tmp_path / 'teacher')}"] if clip == "opd" else []
    result = rlzoo.train(quick(tmp_path / "out", clip=clip, overrides=overrides, steps=1))
    assert result.mlflow_run_id is None
    assert result.metrics[1]["learner/skipped"] < 1
    assert result.metrics[1]["learner/grad_norm"] > 0
    assert all(math.isfinite(value) for value in result.metrics[1].values())
    assert result.metrics[-1]["learner/grad_norm"] > 0
    assert result.metrics[-1]["ratio/log_ratio_max"] > 1e-3


def test_seeds_differ_in_data(tmp_path):
    runs = [
        rlzoo.train(quick(tmp_path / str(seed), steps=1, seed=seed, overrides=["tracking.mlflow=false"])) for seed in (0, 1)
    ]
    questions = [[row["question"] for row in lines(run.path / "rollouts" / "000001.jsonl")] for run in runs]
    assert questions[0] != questions[1]


def test_a_batch_without_a_signal_skips_the_update_and_continues(tmp_path, monkeypatch):
    (tmp_path / "generous.py").write_text("def pay(problem, response):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    overrides = ["task.reward=generous:pay", "tracking.mlflow=false"]
    result = rlzoo.train(quick(tmp_path / "out", overrides=overrides))
    assert [row["learner/skipped"] for row in result.metrics[1:]] == [1.0, 1.0]
    assert [row["reward/mean"] for row in result.metrics[1:]] == [1.0, 1.0]
    assert "clip/fraction" not in result.metrics[1]
    saved = AutoModelForCausalLM.from_pretrained(result.path / "checkpoints" / "step-000002")
    shipped = AutoModelForCausalLM.from_pretrained(f"{rlzoo.__path__[0]}/models/assets/embedded")
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), shipped.parameters(), strict=True))


def test_a_length_penalty_changes_the_advantages_but_not_the_reward(tmp_path):
    overrides = ["reward.overlong_buffer=0.9", "reward.overlong_penalty=0.5", "tracking.mlflow=false"]
    result = rlzoo.train(quick(tmp_path / "out", clip="grpo", steps=1, overrides=overrides))
    texts, tensors = (
        lines(result.path / "rollouts" / "000001.jsonl"),
        load_file(result.path / "rollouts" / "000001.safetensors"),
    )
    rewards = torch.tensor([text["reward"] for text in texts])
    lengths = torch.tensor([text["length"] for text in texts])
    penalty = ((lengths - 2) / 18).clamp(0, 1) / 2  # 20 tokens, the last 18 of which are the buffer
    torch.testing.assert_close(tensors["rewards"], rewards - penalty)
    row = result.metrics[1]
    assert row["reward/mean"] == pytest.approx(float(rewards.mean()))
    assert row["reward/shaped_mean"] == pytest.approx(float((rewards - penalty).mean()))


def test_kl_in_the_reward_trains_and_is_recorded_token_by_token(tmp_path):
    overrides = ["clip.advantage=batch_norm", "clip.reduction=token_mean", "reward.kl_coef=0.05", "tracking.mlflow=false"]
    result = rlzoo.train(quick(tmp_path / "out", clip="grpo", overrides=[*overrides, "learner.lr=3e-4"]))
    first, second = result.metrics[1:]
    assert first["reward/kl"] == pytest.approx(0.0, abs=1e-6)  # the model is its own reference
    assert abs(second["reward/kl"]) > 1e-5
    assert second["learner/grad_norm"] > 0
    assert "learner/kl_ref" not in second
    tensors = load_file(result.path / "rollouts" / "000002.safetensors")
    assert tensors["advantages"].shape == (int(tensors["response_mask"].sum()),)
    assert float(tensors["advantages"].mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(tensors["advantages"].std()) == pytest.approx(1.0, abs=1e-4)


def test_one_update_per_rollout_warns_that_the_clip_is_inert(tmp_path, caplog):
    overrides = ["learner.num_minibatches=1", "learner.warmup_updates=2", "tracking.mlflow=false"]
    with caplog.at_level(logging.WARNING, "rlzoo"):
        result = rlzoo.train(quick(tmp_path / "out", steps=1, overrides=overrides))
    assert "clip is inert: one update per rollout" in caplog.text
    assert "learner.warmup_updates=2: the run has fewer updates (1)" in caplog.text
    assert result.metrics[1]["clip/fraction"] == 0.0
    assert result.metrics[1]["ratio/log_ratio_max"] < 1e-4


def test_kl_to_the_reference_is_logged(tmp_path):
    overrides = ["learner.kl_coef=0.1", "tracking.mlflow=false"]
    result = rlzoo.train(quick(tmp_path / "out", overrides=overrides))
    assert 0 < result.metrics[2]["learner/kl_ref"] < 1


@pytest.mark.long
def test_checkpoints_rotate(tmp_path):
    overrides = ["checkpoint.every=1", "checkpoint.keep=2", "tracking.mlflow=false"]
    result = rlzoo.train(quick(tmp_path / "out", steps=4, overrides=overrides))
    assert sorted(path.name for path in (result.path / "checkpoints").iterdir()) == ["step-000003", "step-000004"]


@pytest.mark.long
def test_an_interrupted_run_keeps_its_results(tmp_path):
    interrupted(quick(tmp_path / "out", steps=9), 2)
    assert [row["step"] for row in lines(tmp_path / "out" / "metrics.jsonl")] == [0, 1, 2]
    (tracked,) = mlflow.search_runs(search_all_experiments=True, output_format="list")
    assert tracked.info.status == "KILLED"


def test_math_questions_train_through_the_same_code(tmp_path):
    pytest.importorskip("math_verify")
    rows = [{"question": f"{a}+{b}=", "answer": f"#### {a + b}"} for a in range(1, 9) for b in range(1, 9)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [
        "task.name=math_file", f"task.path={tmp_path / 'sums.jsonl'}", "task.template='{question}'", "tracking.mlflow=false",
        "rollout.max_new_tokens=10", "rollout.num_prompts=4", "rollout.group_size=4", "eval.num_problems=4",
    ]  # fmt: skip
    config = RunConfig.compose(clip="rloo", overrides=overrides, steps=1, output=tmp_path / "out")
    result = rlzoo.train(config)
    asked = {row["question"]: row["answer"] for row in lines(result.path / "rollouts" / "000001.jsonl")}
    assert asked.items() <= {row["question"]: row["answer"].removeprefix("#### ") for row in rows}.items()
    assert len(asked) == 4


@pytest.mark.long
def test_rules_share_the_draws_of_an_evaluation_and_seeds_do_not(tmp_path):
    def before_training(clip, seed):
        overrides = ["tracking.mlflow=false", "eval.num_problems=64", "rollout.num_prompts=2", "rollout.group_size=2"]
        config = RunConfig.compose(clip=clip, steps=1, seed=seed, overrides=overrides, output=tmp_path / f"{clip}-{seed}")
        return rlzoo.train(config).metrics[0]["eval/accuracy"]

    assert before_training("fspo", 0) == before_training("gspo", 0)
    assert len({before_training("grpo", seed) for seed in (0, 1, 2)}) > 1
