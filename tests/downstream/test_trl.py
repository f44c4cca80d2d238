"""Tests the rules inside TRL's own trainer: `rlzoo.integrations.trl`."""

import copy
import dataclasses
import logging
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import GRPOConfig, GRPOTrainer

from rlzoo import ClipInputs, load_zoo, ops
from rlzoo.core.errors import UserError
from rlzoo.core.reductions import StepCounts
from rlzoo.integrations import trl as ours
from rlzoo.integrations.trl import ClipPolicyTrainer, RecordingTrainer, record, use_policy
from rlzoo.journal.rollout_file import RolloutFile
from rlzoo.models.pretrained import load_pretrained
from tests.learner.test_learner import make_learner, narrow, relative_error
from tests.off_policy import VOCABULARY, make_model, off_policy_batch

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # transformers' own deprecations
ZOO = load_zoo()
MAX_LENGTH = 30


def config_of(folder, **settings):
    return GRPOConfig(**{
        "output_dir": str(folder), "report_to": "none", "save_strategy": "no", "use_cpu": True, "bf16": False,
        "gradient_checkpointing": False, "disable_tqdm": True, "max_steps": 4, "logging_steps": 1, "learning_rate": 1e-3,
        "per_device_train_batch_size": 8, "num_generations": 8, "gradient_accumulation_steps": 2, "steps_per_generation": 4,
        "max_completion_length": 12, **settings,
    })  # fmt: skip


def share_of_digits(completions, **_):
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in completions]


def arguments(folder, model=None, **settings):
    """Return trainer arguments for the embedded model, with noise in its weights so that responses differ in quality."""
    embedded, tokenizer = load_pretrained("embedded")
    if model is None:
        model = embedded
        with torch.no_grad():
            torch.manual_seed(0)
            for weight in model.parameters():
                weight.add_(0.5 * weight.std() * torch.randn_like(weight) if weight.dim() > 1 else 0.0)
    prompts = Dataset.from_dict({"prompt": [f"{a}+{b}=" for a in range(1, 9) for b in range(1, 9)]})
    return {
        "model": model, "processing_class": tokenizer, "args": config_of(folder, **settings), "train_dataset": prompts,
        "reward_funcs": share_of_digits,
    }  # fmt: skip


# Training


def log_of(trainer):
    return [row for row in trainer.state.log_history if "loss" in row]


RULES = ["fspo", "grpo", "gspo", "fspo-adaptive", "turn-ratio"]
ON = {"beta": 0.05, "entropy_coef": 0.01}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_trains_with_a_kl_and_an_entropy_bonus(name, tmp_path):
    trainer = ClipPolicyTrainer(policy=name, **arguments(tmp_path, **ON))
    before = [weight.detach().clone() for weight in trainer.model.parameters()]
    trainer.train()
    steps = log_of(trainer)
    assert [math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in steps] == [True] * 4
    assert [row["clip/at_ratio_1"] for row in steps] == [1, 0, 1, 0]
    assert [row["clip/fraction"] for row in steps][::2] == [0, 0]  # the weights have not changed since sampling
    assert steps[1]["kl"] > 0
    assert all("entropy" in row and "policy_loss" in row and "fairness/lre_max" in row for row in steps)
    assert not any(key.startswith("clip_ratio/") for row in steps for key in row)  # from TRL's own rule
    assert any(not torch.equal(*pair) for pair in zip(before, trainer.model.parameters(), strict=True))
    if name == "gspo":  # the narrowest rule
        assert steps[1]["clip/fraction"] > 0
        bins = [steps[1].get(f"clip/fraction_length_bin_{k}") for k in range(6)]
        assert max(value for value in bins if value is not None) > 0


@pytest.mark.parametrize("name", ["real", "gvpo", "m2po", "top-entropy"])
def test_a_rule_of_the_whole_step_trains_where_a_step_is_one_micro_batch(name, tmp_path):
    settings = {"gradient_accumulation_steps": 1, "steps_per_generation": 1, "num_iterations": 2, **ON}
    trainer = ClipPolicyTrainer(policy=name, **arguments(tmp_path, per_device_train_batch_size=16, **settings))
    trainer.train()
    steps = log_of(trainer)
    assert [row["clip/at_ratio_1"] for row in steps] == [1, 0, 1, 0]
    assert all(row["grad_norm"] > 0 for row in steps)


@pytest.mark.parametrize("max_completion_length", [1, 3])
def test_a_rule_trains_where_truncated_responses_are_masked(max_completion_length, tmp_path, caplog):
    settings = {"mask_truncated_completions": True, "max_completion_length": max_completion_length, **ON}
    trainer = ClipPolicyTrainer(policy="fspo-adaptive", record_to=tmp_path / "rollouts", **arguments(tmp_path, **settings))
    trainer.train()
    assert trainer.state.global_step == 4
    assert all(math.isfinite(row["loss"]) for row in log_of(trainer))
    if max_completion_length == 3:  # some responses are finished
        step = RolloutFile.load(tmp_path / "rollouts" / "000001.safetensors")
        assert 0 < int(step.finished.sum()) < 32
        assert torch.equal(step.lengths > 0, step.finished)
        assert any(row.get("clip/fraction") for row in log_of(trainer))


def test_an_adapter_is_trained_and_its_base_is_the_reference(tmp_path):
    given = arguments(tmp_path, **ON)
    base = {name: weight.detach().clone() for name, weight in given["model"].named_parameters()}
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    trainer = ClipPolicyTrainer(policy="fspo", record_to=tmp_path / "rollouts", peft_config=adapter, **given)
    trainer.train()
    steps = log_of(trainer)
    assert steps[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert steps[-1]["kl"] > 0
    weights = dict(trainer.model.base_model.model.named_parameters())
    assert all(torch.equal(value, weights[name]) for name, value in base.items() if name in weights)
    step = RolloutFile.load(tmp_path / "rollouts" / "000001.safetensors")
    torch.testing.assert_close(step.ref_log_probs, step.old_log_probs, atol=1e-5, rtol=0)


def test_an_adaptive_rule_is_updated_every_step_and_saved_in_checkpoints(tmp_path, monkeypatch):
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    trainer = ClipPolicyTrainer(policy="fspo-adaptive", **arguments(tmp_path, **settings))
    seen, update = [], ours.updated
    monkeypatch.setattr(ours, "updated", lambda policy, stats: (seen.append(update(policy, stats)), seen[-1])[1])
    trainer.train()
    assert len(seen) == 4
    assert len(set(map(repr, seen))) > 1
    assert any(name.startswith("clip/band_high_length_bin_") for name in log_of(trainer)[-1])  # the metrics to watch
    resumed, restored = ClipPolicyTrainer(policy="fspo-adaptive", **arguments(tmp_path, **settings)), []
    resumed._load_optimizer_and_scheduler = lambda checkpoint: (
        ClipPolicyTrainer._load_optimizer_and_scheduler(resumed, checkpoint),
        restored.append(resumed.policy),
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert restored == [seen[1]]
    (tmp_path / "checkpoint-4" / "clip_policy.json").write_text("{")
    with pytest.raises(UserError, match=r"clip_policy.json' does not contain the state of fspo-adaptive"):
        ClipPolicyTrainer(policy="fspo-adaptive", **arguments(tmp_path, **settings)).train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-4")
        )


def test_an_adaptive_rule_is_updated_from_the_whole_step(tmp_path, monkeypatch):
    stats = []
    monkeypatch.setattr(ours, "updated", lambda policy, given: (stats.append(given), policy)[1])
    arguments_ = arguments(tmp_path, max_steps=2)
    trainer = ClipPolicyTrainer(policy="fspo-adaptive", record_to=tmp_path / "rollouts", **arguments_)
    trainer.train()
    step = RolloutFile.load(tmp_path / "rollouts" / "000001.safetensors")
    for given, update in zip(stats, step.updates, strict=True):
        moved = update.rows[step.advantages[update.rows] != 0]
        assert int(given.num_responses.sum()) == len(moved)  # from both micro-batches
        assert float(given.length.sum()) == float(step.lengths[moved].sum())
        assert torch.equal(given.bin_edges, ours.bin_edges(step.lengths))
    assert [given.progress for given in stats] == [0.0, 0.5]


# The gradient


@pytest.fixture(scope="module")
def model():
    return make_model()


def with_model(tmp_path, model, **settings):
    given = {"max_completion_length": MAX_LENGTH, "steps_per_generation": 2, **settings}
    return GRPOTrainer(**arguments(tmp_path, copy.deepcopy(model), **given))


@pytest.fixture(scope="module")
def trainers(tmp_path_factory, model):
    """Trainers with two micro-batches and with one micro-batch per step; each test adds its rule to them."""
    folder = tmp_path_factory.mktemp("trl")
    one = {"gradient_accumulation_steps": 1, "steps_per_generation": 1, "num_iterations": 2}
    return {"token": with_model(folder, model), "batch": with_model(folder, model, **one)}


def micro_batches(batch, number):
    """Return the rows of a learner's batch, padded and cut into micro-batches as in TRL."""
    size, width = len(batch), max(batch.prompt_lengths.tolist())
    prompt, prompt_mask = torch.zeros(size, width, dtype=torch.long), torch.zeros(size, width, dtype=torch.long)
    completion, completion_mask = (torch.zeros(batch.response_mask.shape, dtype=torch.long) for _ in range(2))
    for row, (sequence, start) in enumerate(zip(batch.sequences, batch.prompt_lengths.tolist(), strict=True)):
        length = len(sequence) - start
        prompt[row, width - start :], prompt_mask[row, width - start :] = sequence[:start], 1
        completion[row, :length], completion_mask[row, :length] = sequence[start:], 1
    inputs = {
        "prompt_ids": prompt, "prompt_mask": prompt_mask, "completion_ids": completion, "completion_mask": completion_mask,
        "tool_mask": batch.response_mask.long(), "advantages": batch.advantages[:, 0],
        "old_per_token_logps": batch.old_log_probs, "sampling_per_token_logps": batch.rollout_log_probs,
        ours.ENTROPY: batch.old_entropy, ours.GROUPS: batch.group_ids, ours.REWARDS: batch.rewards,
        ours.FINISHED: batch.finished, ours.ROWS: torch.arange(size),
    }  # fmt: skip
    if batch.ref_log_probs is not None:
        inputs["ref_per_token_logps"] = batch.ref_log_probs
    passes = [{name: values.chunk(number)[index] for name, values in inputs.items()} for index in range(number)]
    for micro_batch in passes:
        micro_batch["num_items_in_batch"] = batch.response_mask.sum()
    return passes


def step_of(trainer, passes, model=None):
    """Return the loss and the gradient of one optimizer step; ``model`` is the trainer's, wrapped for several processes."""
    trainer.model.train()
    trainer._buffered_inputs, trainer.current_gradient_accumulation_steps = passes, len(passes)
    trainer.model.zero_grad()
    total = 0.0
    for trainer._step, micro_batch in enumerate(passes):
        loss = trainer._compute_loss(model or trainer.model, micro_batch)
        loss.backward()
        total += loss.item()
    return total, torch.cat([weight.grad.flatten() for weight in trainer.model.parameters()])


def of_the_learner(model, policy, batch, **settings):
    learner = make_learner(model, policy, **settings)
    measured = learner.accumulate(batch, torch.arange(len(batch)), seed=42)
    return -measured.objective, torch.cat([weight.grad.flatten() for weight in learner.model.parameters()]), measured


@pytest.mark.parametrize("name", [name for name in ZOO if name != "opd"])
def test_the_gradient_equals_that_of_the_learner(name, model, trainers):
    policy = narrow(ZOO[name]())
    batch = off_policy_batch(model, policy)
    batch = dataclasses.replace(batch, ref_log_probs=batch.old_log_probs)
    trainer = use_policy(trainers["batch" if policy.scope == "batch" else "token"], policy)
    loss, gradient = step_of(trainer, micro_batches(batch, trainer.args.gradient_accumulation_steps))
    expected_loss, expected, measured = of_the_learner(model, policy, batch)
    assert expected.norm() > 0
    assert relative_error(gradient, expected) < 1e-5
    assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-7)
    trainer._end_update()
    logged, table = trainer._logged.metrics(), measured.table.judged()
    assert logged["clip/fraction"] == pytest.approx(float(table.clipped.double().mean()), abs=1e-6)
    assert {key.removeprefix("rule/"): value for key, value in logged.items() if key.startswith("rule/")} == pytest.approx(
        dict(measured.rule_metrics), rel=1e-4, abs=1e-6
    )


REDUCTIONS = {"grpo": "sequence_mean", "dapo": "token_mean", "dr_grpo": "constant_length", "luspo": "sequence_mean_token_sum"}


OFF = {
    "beta": 0.0, "_entropy_bonus_enabled": False, "entropy_coef": 0.0, "use_adaptive_entropy": False,
}  # fmt: skip


def like_trl(tmp_path, model, loss_type, **changed):
    """Return TRL's own trainer, and ours with the rule grpo; ``changed`` sets attributes of both."""
    theirs = with_model(tmp_path, model, loss_type=loss_type)
    mine = use_policy(with_model(tmp_path, model), "grpo", reduction=REDUCTIONS[loss_type])
    for trainer in (theirs, mine):
        for name, value in changed.items():
            setattr(trainer, name, value)
    return theirs, mine


def assert_same(one, other, tolerance=1e-5):
    assert one[0] == pytest.approx(other[0], rel=tolerance, abs=1e-6)
    assert relative_error(one[1], other[1]) < tolerance


@pytest.mark.parametrize("loss_type", REDUCTIONS)
def test_grpo_equals_the_grpo_of_trl(loss_type, model, tmp_path):
    batch = off_policy_batch(model, ZOO["grpo"]())
    batch = dataclasses.replace(batch, ref_log_probs=batch.old_log_probs + 0.2)
    theirs, mine = like_trl(tmp_path, model, loss_type)
    assert_same(step_of(mine, micro_batches(batch, 2)), step_of(theirs, micro_batches(batch, 2)))
    mine._end_update()
    assert 0.1 < mine._logged.metrics()["clip/fraction"] < 0.4
    # with all other terms of TRL's loss
    for changed in (
        {"beta": 0.5},
        {"_entropy_bonus_enabled": True, "entropy_coef": 0.5},
        {"use_adaptive_entropy": True, "_entropy_bonus_enabled": True, "entropy_coef": 0.3, "_last_world_entropy": 0.0},
        {"beta": 0.5, "_entropy_bonus_enabled": True, "entropy_coef": 0.5},
    ):
        for trainer in (theirs, mine):
            for name, value in (OFF | changed).items():
                setattr(trainer, name, value)
        expected = step_of(theirs, micro_batches(batch, 2))
        assert_same(step_of(mine, micro_batches(batch, 2)), expected)
        assert mine.entropy_coef == pytest.approx(theirs.entropy_coef)
        assert ("policy_loss" in mine._metrics["train"]) == ("policy_loss" in theirs._metrics["train"])
        if "policy_loss" in theirs._metrics["train"]:
            got, wanted = (trainer._metrics["train"].pop("policy_loss") for trainer in (mine, theirs))
            assert sum(got) == pytest.approx(sum(wanted), rel=1e-4)


@pytest.mark.parametrize("corrected", [True, False])
def test_the_kl_matches_the_learner_and_the_entropy_bonus_matches_float64(corrected, model, tmp_path):
    policy = ZOO["fspo"]()
    batch = off_policy_batch(model, policy)
    old = batch.old_log_probs
    batch = dataclasses.replace(batch, ref_log_probs=torch.where(batch.response_mask, old + 0.3 * torch.sin(old), 0.0))
    trainer = use_policy(with_model(tmp_path, model, use_bias_correction_kl=corrected), policy)
    _, without = step_of(trainer, micro_batches(batch, 2))
    trainer.beta = 0.5
    _, got = step_of(trainer, micro_batches(batch, 2))
    _, expected, _ = of_the_learner(model, policy, batch, kl_coef=0.5, kl_estimator="unbiased_k3" if corrected else "k3")
    assert relative_error(got, expected) < 1e-5

    trainer.beta, trainer.entropy_coef, trainer._entropy_bonus_enabled = 0.0, 0.5, True
    _, got = step_of(trainer, micro_batches(batch, 2))
    exact = copy.deepcopy(model).double()
    for rows in torch.arange(len(batch)).chunk(2):  # a mean over the tokens of each micro-batch, and then over micro-batches
        for row in rows.tolist():
            log_probs = exact(input_ids=batch.sequences[row][None]).logits[0].log_softmax(-1)
            entropy = -(log_probs.exp() * log_probs).sum(-1)[int(batch.prompt_lengths[row]) - 1 : -1]
            chosen = entropy[batch.response_mask[row][: len(entropy)]]
            (chosen.sum() / batch.lengths[rows].sum() / 2).backward()
    bonus = torch.cat([weight.grad.flatten() for weight in exact.parameters()])
    assert relative_error((got - without).double(), -0.5 * bonus) < 1e-4


@pytest.mark.parametrize("by_token", [False, True])
def test_the_vllm_correction_equals_that_of_trl(by_token, model, tmp_path):
    batch = off_policy_batch(model, ZOO["grpo"]())
    rng = torch.Generator().manual_seed(0)
    ratio = 0.5 + torch.rand(batch.response_mask.shape if by_token else (len(batch), 1), generator=rng)
    ratio[1] = 0.0  # as in the modes that mask

    def weighted_passes(batch):
        passes = micro_batches(batch, 2)
        for micro_batch, share in zip(passes, ratio.chunk(2), strict=True):
            micro_batch["importance_sampling_ratio"] = share
        return passes

    theirs, mine = like_trl(tmp_path, model, "grpo", use_vllm=True)
    assert_same(step_of(mine, weighted_passes(batch)), step_of(theirs, weighted_passes(batch)))
    loss, expected, _ = of_the_learner(model, ZOO["grpo"](), dataclasses.replace(batch, correction_weights=ratio))
    assert_same(step_of(mine, weighted_passes(batch)), (loss, expected))
    # a rule whose ratio is relative to the sampler needs no correction
    named = {"name": "to-sampler", "ratio_to_sampler": True, "__doc__": "", "__module__": __name__}
    loss, expected, _ = of_the_learner(model, ZOO["grpo"](), batch)
    assert_same(step_of(use_policy(mine, type("ToSampler", (ZOO["grpo"],), named)()), weighted_passes(batch)), (loss, expected))
    # one objective per response
    use_policy(mine, "gspo")
    if by_token:
        with pytest.raises(UserError, match="gspo has one objective per response; choose a correction with one weight per"):
            step_of(mine, weighted_passes(batch))
        return
    batch = off_policy_batch(model, ZOO["gspo"]())
    loss, expected, _ = of_the_learner(model, ZOO["gspo"](), dataclasses.replace(batch, correction_weights=ratio))
    assert_same(step_of(mine, weighted_passes(batch)), (loss, expected))


def test_a_token_that_vllm_did_not_score_uses_the_old_log_prob(model, trainers):
    seen = []

    class Seeing(ZOO["grpo"]):
        """Stores its inputs."""

        name = "seeing"

        def __call__(self, inputs):
            seen.append(inputs)
            return super().__call__(inputs)

    batch = off_policy_batch(model, ZOO["grpo"]())
    (micro_batch,) = micro_batches(batch, 1)
    micro_batch["sampling_per_token_logps"] = torch.where(torch.arange(MAX_LENGTH) == 0, torch.nan, batch.old_log_probs - 1)
    trainer = use_policy(trainers["batch"], Seeing())
    _, gradient = step_of(trainer, [micro_batch])
    assert gradient.isfinite().all()
    assert torch.equal(seen[0].rollout_log_probs[:, 0], batch.old_log_probs[:, 0])
    assert torch.equal(seen[0].rollout_log_probs[:, 1:], (batch.old_log_probs - 1)[:, 1:])


def test_a_large_log_ratio_gives_finite_values(model, trainers):
    # TRL's own rule gives NaN here, because it takes exp before it clamps
    batch = off_policy_batch(model, ZOO["grpo"]())
    batch.old_log_probs[0, 0] = -200.0
    _, gradient = step_of(use_policy(trainers["token"], "grpo"), micro_batches(batch, 2))
    assert gradient.isfinite().all()


def test_the_router_loss_equals_that_of_trl(tmp_path):
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
        router_aux_loss_coef=0.5, initializer_range=0.2,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    batch = off_policy_batch(model, ZOO["grpo"]())
    theirs, mine = like_trl(tmp_path, model, "grpo")
    assert theirs.aux_loss_enabled
    assert_same(step_of(mine, micro_batches(batch, 2)), step_of(theirs, micro_batches(batch, 2)))
    assert mine._metrics["train"]["aux_loss"] == pytest.approx(theirs._metrics["train"]["aux_loss"])
    for trainer in (theirs, mine):
        trainer.aux_loss_enabled = False
    without = step_of(mine, micro_batches(batch, 2))
    assert_same(without, step_of(theirs, micro_batches(batch, 2)))


def test_the_counts_cover_the_whole_step(tmp_path):
    trainer = ClipPolicyTrainer(policy="grpo", **arguments(tmp_path))
    trainer.current_gradient_accumulation_steps = 2
    trainer.model.train()
    masks = [torch.arange(5) < torch.tensor(length)[:, None] for length in ([5, 2], [1, 0], [5, 3], [4, 4])]
    trainer._buffered_inputs = [{"completion_mask": mask.long()} for mask in masks]
    trainer._buffered_inputs[3]["tool_mask"] = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 1]])
    counts = []
    for trainer._step in range(8):
        counts.append(trainer._counts(trainer._buffered_inputs[trainer._step % 4]))
    # the first step has 5 + 2 + 1 tokens in 3 responses, the second 5 + 3 + 2 + 0 in 3; then both repeat
    assert counts == 2 * [StepCounts(3, 8), StepCounts(3, 8), StepCounts(3, 10), StepCounts(3, 10)]
    trainer.model.eval()
    assert trainer._counts(trainer._buffered_inputs[0]) == StepCounts(2, 7)


# Entry points


def test_an_existing_trainer_and_a_subclass_take_a_rule(model, tmp_path):
    class Louder(GRPOTrainer):
        """Adds its own term to the loss, from TRL's forward pass."""

        def _compute_loss(self, model, inputs):
            return 2 + super()._compute_loss(model, inputs)

    class Both(ClipPolicyTrainer, Louder):
        """Combines the rule with that term."""

    batch = off_policy_batch(model, ZOO["fspo"](width_low=0.02))
    loss, gradient, _ = of_the_learner(model, ZOO["fspo"](width_low=0.02), batch)
    settings = {"max_completion_length": MAX_LENGTH, "steps_per_generation": 2}
    existing = Louder(**arguments(tmp_path, copy.deepcopy(model), **settings))
    assert use_policy(existing, "fspo", width_low=0.02) is existing
    derived = Both(policy=ZOO["fspo"](width_low=0.02), **arguments(tmp_path, copy.deepcopy(model), **settings))
    for trainer in (existing, derived):
        assert isinstance(trainer, Louder)
        assert trainer.policy == ZOO["fspo"](width_low=0.02)
        assert_same(step_of(trainer, micro_batches(batch, 2)), (loss + 4, gradient))


def test_evaluation_has_a_loss_and_no_clip_metrics(tmp_path):
    given = arguments(tmp_path, max_steps=1, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=8)
    given["eval_dataset"] = given["train_dataset"].select(range(1))
    trainer = ClipPolicyTrainer(policy="fspo", record_to=tmp_path / "rollouts", **given)
    trainer.train()
    (row,) = [row for row in trainer.state.log_history if "eval_loss" in row]
    assert math.isfinite(row["eval_loss"])
    assert "eval_reward" in row
    assert not any("clip" in name and "clipped_ratio" not in name for name in row)
    assert [file.name for file in (tmp_path / "rollouts").iterdir()] == ["000001.safetensors"]


def test_one_step_per_generation_warns(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "rlzoo"):
        ClipPolicyTrainer(policy="fspo", **arguments(tmp_path, steps_per_generation=2))
    assert "the ratio is always 1, so no rule clips anything; set num_iterations=2" in caplog.text


@pytest.mark.parametrize(
    ("policy", "settings", "message"),
    [("grpo", {"epsilon": 0.1, "delta": 2.0}, r"delta=2.0 \(instead: dual_clip\), epsilon=0.1 \(instead: clip_low, clip_h"),
     ("grpo", {"loss_type": "grpo"}, r"loss_type='grpo' \(instead: reduction\): "),
     ("grpo", {"importance_sampling_level": "sequence"}, r"importance_sampling_level='sequence' \("),
     (ZOO["grpo"](advantage="group_mean"), {}, "gives group_norm; set scale_rewards='none'"),
     (ZOO["grpo"](advantage="max_rl"), {}, "advantage='max_rl': TRL computes the advantages, and .*='group' gives group_norm$"),
     ("opd", {}, "opd is meant for reverse_kl advantages, which need old_log_probs, ref_log_probs, but TRL computes"),
     ("m2po", {}, "m2po needs all responses of a step together, but a step has 2 micro-batches"),
     ("real", {"gradient_accumulation_steps": 1, "steps_per_generation": 2}, "splits a generation batch into 2 micro-batches"),
     ("grpo", {"steps_per_generation": 1}, "steps_per_generation=1 must be a multiple of gradient_accumulation_steps=2"),
     ("grpo", {"top_entropy_quantile": 0.2}, r"top_entropy_quantile=0.2 \(instead: the rule top-entropy\): grpo"),
     ("dapo", {}, "'dapo' is a config, not a rule; its rule is grpo/clip_high:0.28"),
     ("grop", {}, "unknown rule 'grop'.*did you mean 'grpo'")],
    ids=str,
)  # fmt: skip
def test_settings_that_would_be_ignored_or_wrong_are_rejected(policy, settings, message, tmp_path):
    with pytest.raises(UserError, match=message):
        ClipPolicyTrainer(policy=policy, **arguments(tmp_path, **settings))


@pytest.mark.parametrize(
    ("rule", "settings", "used", "warning"),
    [("rloo", {}, "group_norm", "rloo is meant for leave_one_out advantages.*'none' gives these advantages times 1 - 1 /"),
     ("topr", {}, "group_norm", "topr is meant for group_mean advantages.*; set scale_rewards='none'$"),
     ("rloo", {"scale_rewards": "none"}, "group_mean", None),
     ("topr", {"scale_rewards": "none"}, "group_mean", None),
     (ZOO["rloo"](advantage="group_norm"), {}, "group_norm", None),
     ("grpo", {"multi_objective_aggregation": "normalize_then_sum"}, "gdpo", "grpo is meant for group_norm.* gives gdpo$"),
     ("topr", {"scale_rewards": "batch"}, "group_mean", "'batch' gives no estimator of rlzoo; set scale_rewards='none'$")],
    ids=str,
)  # fmt: skip
def test_the_rule_has_the_estimator_that_trl_uses(rule, settings, used, warning, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "rlzoo"):
        assert ClipPolicyTrainer(policy=rule, **arguments(tmp_path, **settings)).policy.advantage == used
    assert re.search(warning, caplog.messages[0]) if warning else not caplog.messages


def test_an_unsuitable_trainer_or_policy_is_rejected(model, trainers, tmp_path):
    trainer = with_model(tmp_path, model)
    with pytest.raises(UserError, match=r"unknown key 'fspo/width'"):
        use_policy(trainer, "fspo", width=0.1)
    with pytest.raises(UserError, match="width_low: settings can be passed only with the name of a rule"):
        use_policy(trainer, ZOO["fspo"](), width_low=0.1)
    with pytest.raises(UserError, match="the trainer is a Qwen3ForCausalLM; it must be TRL's GRPOTrainer"):
        record(model, tmp_path)
    needs = type("NeedsReference", (ZOO["grpo"],), {"name": "needs-reference", "needs": frozenset({"ref_log_probs"}),
                                                    "__module__": __name__})  # fmt: skip
    with pytest.raises(UserError, match="needs ref_log_probs, but TRL has a reference model only if beta is above 0"):
        use_policy(trainer, needs())
    assert type(trainer) is GRPOTrainer  # nothing was changed
    use_policy(trainer, "grpo")

    class Own(GRPOTrainer):
        """Computes its log-probs without TRL's method."""

        def _compute_loss(self, model, inputs):
            return model(input_ids=inputs["prompt_ids"]).logits.sum()

    class Dropping(GRPOTrainer):
        """Trains on fewer responses than it grades."""

        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            return {name: values if values.ndim == 0 else values[:16] for name, values in output.items()}

    with pytest.raises(UserError, match="graded 32 responses but trains on 16, and rlzoo cannot match them"):
        use_policy(Dropping(**arguments(tmp_path)), "grpo").train()
    own = Own(**arguments(tmp_path, copy.deepcopy(model), steps_per_generation=2))
    batch = off_policy_batch(model, ZOO["grpo"]())
    with pytest.raises(UserError, match="must call TRL's _get_per_token_logps_and_entropies"):
        step_of(use_policy(own, "grpo"), micro_batches(batch, 2))
    batch = dataclasses.replace(batch, advantages=batch.advantages.expand(batch.response_mask.shape))
    passes = micro_batches(batch, 2)
    for micro_batch, advantages in zip(passes, batch.advantages.chunk(2), strict=True):
        micro_batch["advantages"] = advantages
    step_of(use_policy(trainers["token"], "grpo"), passes)
    with pytest.raises(UserError, match="per-token advantages, but fspo needs one per response"):
        step_of(use_policy(trainers["token"], "fspo"), passes)


def test_without_trl_the_import_says_how_to_install_it():
    code = (
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *more: None if name == 'trl' else find(name, *more)\n"
        "import rlzoo.integrations.trl"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "UserError: trl is not installed: pip install" in done.stderr.splitlines()[-1]


# Recording


def inputs_of(step, update):
    """Return a rule's inputs at one update of a rollout file."""
    chosen = torch.split(torch.ones(int(step.lengths.sum())), step.lengths.tolist())
    width = int(step.lengths.max())

    def laid_out(flat, lengths):
        rows = torch.split(flat, lengths.tolist())
        return torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in rows])

    assert len(chosen) == len(step)
    mask = torch.arange(width) < step.lengths[update.rows][:, None]
    old = laid_out(step.old_log_probs, step.lengths)[update.rows]
    return ClipInputs(laid_out(update.log_probs, step.lengths[update.rows]), old, step.advantages[update.rows][:, None], mask)


def clip_fraction(policy, step):
    """Return the clip fraction of responses with a nonzero advantage, over all updates of a rollout file."""
    shares = []
    for update in step.updates:
        inputs = inputs_of(step, update)
        share = ops.per_response(policy(inputs).clipped.float(), inputs.response_mask)
        shares.append(share[inputs.advantages != 0])
    return torch.cat(shares).double().mean().item()


@pytest.mark.parametrize("name", ["fspo", "gspo", "grpo"])
def test_recorded_rollouts_have_the_clip_fraction_of_the_run(name, tmp_path):
    folder = tmp_path / "rollouts"
    trainer = ClipPolicyTrainer(
        policy=ZOO[name](), record_to=folder, **arguments(tmp_path, max_steps=8, num_iterations=2, logging_steps=4, **ON)
    )
    start = copy.deepcopy({name: weight.detach() for name, weight in trainer.model.named_parameters()})
    trainer.train()
    steps = [RolloutFile.load(folder / f"00000{number}.safetensors") for number in (1, 2)]
    assert sorted(file.name for file in folder.iterdir()) == ["000001.safetensors", "000002.safetensors"]
    logged = [row["clip/fraction"] for row in log_of(trainer)]
    assert logged == pytest.approx([clip_fraction(ZOO[name](), step) for step in steps], abs=1e-6)
    if name == "gspo":
        assert min(logged) > 0.1
    for number, step in enumerate(steps):
        assert (step.step, step.num_steps, step.max_length, step.temperature, step.seed) == (
            number + 1,
            2,
            12,
            1.0,
            42 + 4 * number,
        )
        assert step.rule == {"name": name, **ZOO[name]().model_dump(mode="json")}
        assert (step.writer.split()[0], step.model.endswith("embedded")) == ("trl", True)
        assert [len(update.rows) for update in step.updates] == [16] * 4
        halves = [set(update.rows.tolist()) for update in step.updates]
        assert halves[0] | halves[1] == set(range(32)) == halves[2] | halves[3]
        assert step.group_ids.tolist() == [row // 8 for row in range(32)]
        assert step.policy_versions.tolist() == [4 * number] * 32
        assert step.rollout_log_probs is None  # transformers' sampler does not report them
        assert step.ref_log_probs is not None
        rewards = step.rewards.view(4, 8)
        expected = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        torch.testing.assert_close(step.advantages, expected.flatten(), atol=1e-5, rtol=1e-5)
    # the first batch: rewards of the text, log-probs of the untrained model
    fresh, tokenizer = load_pretrained("embedded")
    fresh.load_state_dict(start, strict=False)
    first = steps[0]
    sequences = torch.split(first.token_ids, first.sequence_lengths.tolist())
    old = torch.split(first.old_log_probs, first.lengths.tolist())
    for row in range(0, 32, 5):
        length = int(first.lengths[row])
        text = tokenizer.decode(sequences[row][-length:], skip_special_tokens=True)
        assert first.rewards[row].item() == pytest.approx(share_of_digits([text])[0])
        assert bool(first.finished[row]) == (sequences[row][-1].item() == tokenizer.eos_token_id)
        with torch.no_grad():
            log_probs = fresh(input_ids=sequences[row][None]).logits[0].log_softmax(-1)[:-1]
        picked = log_probs.gather(-1, sequences[row][1:, None])[-length:, 0]
        torch.testing.assert_close(old[row], picked, atol=2e-5, rtol=0)
        torch.testing.assert_close(torch.split(first.ref_log_probs, first.lengths.tolist())[row], log_probs_of_reference(
            sequences[row], length), atol=2e-5, rtol=0)  # fmt: skip


def log_probs_of_reference(sequence, length):
    """Return log-probs of the stored model, from which TRL loads its reference."""
    model, _ = load_pretrained("embedded")
    with torch.no_grad():
        log_probs = model(input_ids=sequence[None]).logits[0].log_softmax(-1)[:-1]
    return log_probs.gather(-1, sequence[1:, None])[-length:, 0]


def test_recording_does_not_change_a_run_with_the_loss_of_trl(tmp_path):
    weights = []
    for folder in (None, tmp_path / "rollouts"):
        trainer = GRPOTrainer(**arguments(tmp_path, max_steps=3, steps_per_generation=2, num_iterations=2))
        if folder is not None:
            assert record(trainer, folder) is trainer
            assert isinstance(trainer, RecordingTrainer)
        trainer.train()
        weights.append(torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()]))
    assert torch.equal(*weights)
    steps = [RolloutFile.load(file) for file in sorted((tmp_path / "rollouts").iterdir())]
    assert [len(step.updates) for step in steps] == [2, 1]  # the run ended in the middle of a generation
    assert [step.rule for step in steps] == [{}, {}]


def test_with_one_update_per_generation_old_log_probs_equal_log_probs(tmp_path):
    trainer = GRPOTrainer(**arguments(tmp_path, max_steps=1, steps_per_generation=2))
    record(trainer, tmp_path / "rollouts").train()
    step = RolloutFile.load(tmp_path / "rollouts" / "000001.safetensors")
    (update,) = step.updates
    inputs = inputs_of(step, update)
    assert torch.equal(inputs.old_log_probs, inputs.log_probs)
    assert bool((step.old_log_probs < 0).any())


def test_a_folder_with_files_is_refused_and_a_resumed_run_continues_in_its_folder(tmp_path):
    folder = tmp_path / "rollouts"
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    ClipPolicyTrainer(policy="fspo", record_to=folder, **arguments(tmp_path, **settings)).train()
    content = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert sorted(content) == ["000001.safetensors", "000002.safetensors"]
    with pytest.raises(UserError, match=r"already contains '000001\.safetensors': choose a new or empty folder, or resume"):
        ClipPolicyTrainer(policy="fspo", record_to=folder, **arguments(tmp_path, **settings)).train()
    other = ClipPolicyTrainer(policy="gspo", record_to=folder, **arguments(tmp_path, **settings))
    with pytest.raises(UserError, match=r"recorded with fspo, not gspo: resume with fspo, or choose a new folder"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    again = ClipPolicyTrainer(policy="fspo", record_to=folder, **arguments(tmp_path, **settings))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert sorted(file.name for file in folder.iterdir()) == ["000001.safetensors", "000002.safetensors"]
    assert (folder / "000001.safetensors").read_bytes() == content["000001.safetensors"]
    assert RolloutFile.load(folder / "000002.safetensors").step == 2
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is not a writable folder"):
        ClipPolicyTrainer(policy="fspo", record_to=tmp_path / "file", **arguments(tmp_path)).train()


def test_turns_and_sampler_log_probs_reach_the_rule_and_the_file(tmp_path):
    # a custom sampler: three tokens of the model, two of an environment, four of the model
    given, seen = {}, []

    class Seeing(ZOO["turn-ratio"]):
        """Stores its inputs."""

        name = "seeing"

        def __call__(self, inputs):
            seen.append(inputs)
            return super().__call__(inputs)

    def rollout(prompts, trainer):
        rng = torch.Generator().manual_seed(0)
        ids = torch.randint(3, 14, (len(prompts), 9), generator=rng)
        given["log_probs"] = -torch.rand(len(prompts), 9, generator=rng)
        prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        mask = [[1, 1, 1, 0, 0, 1, 1, 1, 1]] * len(prompts)
        log_probs = given["log_probs"].tolist()
        return {"prompt_ids": prompt_ids, "completion_ids": ids.tolist(), "logprobs": log_probs, "env_mask": mask}

    trainer = ClipPolicyTrainer(
        policy=Seeing(), record_to=tmp_path / "rollouts", rollout_func=rollout, **arguments(tmp_path, max_steps=2)
    )
    trainer.train()
    turns = [0, 0, 0, -1, -1, 1, 1, 1, 1]
    assert {tuple(row) for inputs in seen[:4] for row in inputs.turn_ids.tolist()} == {tuple(turns)}
    chosen = torch.tensor(turns) >= 0
    step = RolloutFile.load(tmp_path / "rollouts" / "000001.safetensors")
    assert step.turn_ids.tolist() == [turn for turn in turns if turn >= 0] * 32
    torch.testing.assert_close(step.rollout_log_probs.view(32, 7), given["log_probs"][:, chosen])
    assert step.lengths.tolist() == [7] * 32
    for inputs in seen[::2]:  # a rule with needs is called again at ratio 1, for its weights
        assert torch.equal(inputs.response_mask, chosen.expand(8, 9))
        rows = torch.stack([(given["log_probs"] - row).abs().sum(1).argmin() for row in inputs.rollout_log_probs])
        torch.testing.assert_close(inputs.rollout_log_probs, given["log_probs"][rows])


def test_the_code_on_the_page_trains_and_records(tmp_path, monkeypatch):
    root = Path(__file__).parents[2]
    command = [sys.executable, "-W", "ignore", root / "examples" / "trl_fspo.py", "--steps", "4"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    step = RolloutFile.load(tmp_path / "trl-rollouts" / "000001.safetensors")
    assert (len(step), len(step.updates), step.rule["name"]) == (64, 4, "fspo")
    assert 0.2 < step.rewards.mean() < 0.95
    page = (root / "docs" / "how-to" / "trl.md").read_text()
    block = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    monkeypatch.chdir(tmp_path)
    Path("trl-rollouts").rename("of-the-script")
    exec(block, {})
    steps = [RolloutFile.load(file) for file in sorted(Path("trl-rollouts").iterdir())]
    assert [(len(step), len(step.updates)) for step in steps] == [(64, 4)] * 4
    assert max(step.rewards.max() for step in steps) == 1


# Two processes


def test_two_processes_have_the_gradient_of_one_process(model, tmp_path):
    policies = ["grpo", "fspo"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=0", "--standalone",
               "-m", "tests.downstream.trl_two_processes", str(tmp_path), *policies]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]
    for name in policies:
        batch = off_policy_batch(model, ZOO[name](), num_responses=20)
        trainer = use_policy(with_model(tmp_path, model, steps_per_generation=4, gradient_accumulation_steps=4), name)
        trainer.beta = 0.1
        batch = dataclasses.replace(batch, ref_log_probs=batch.old_log_probs + 0.1)
        loss, gradient = step_of(trainer, micro_batches(batch, 4))
        trainer._end_update()
        got = torch.load(tmp_path / f"{name}.pt")
        assert_same((got["loss"], got["gradient"]), (loss, gradient))
        expected = trainer._logged.metrics()
        assert got["metrics"] == pytest.approx(expected, rel=1e-5)
    # a whole run: the file has the rows of both processes, and both have the same rule
    steps = [RolloutFile.load(file) for file in sorted((tmp_path / "rollouts").iterdir())]
    assert [(len(step), len(step.updates), step.rule["name"]) for step in steps] == [(32, 2, "fspo-adaptive")] * 2
    for step in steps:
        assert step.group_ids.tolist() == [row // 8 for row in range(32)]
        assert sorted(torch.cat([update.rows for update in step.updates]).tolist()) == list(range(32))
        rewards = step.rewards.view(4, 8)
        expected = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        torch.testing.assert_close(step.advantages, expected.flatten(), atol=1e-5, rtol=1e-5)
        for update in step.updates[:1]:
            inputs = inputs_of(step, update)
            torch.testing.assert_close(inputs.log_probs, inputs.old_log_probs, atol=1e-4, rtol=0)
    assert (
        (tmp_path / "rule-0.json").read_text()
        == (tmp_path / "rule-1.json").read_text()
        != ZOO["fspo-adaptive"]().model_dump_json()
    )
