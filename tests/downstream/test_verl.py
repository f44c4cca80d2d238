"""Tests rlzoo inside verl: policy losses, advantage estimators and its worker's loss on a small model."""

import dataclasses
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn
from verl.utils.metric import Metric, reduce_metrics
from verl.utils.tensordict_utils import assign_non_tensor
from verl.workers.utils.losses import ppo_loss

from rlzoo import load_zoo
from rlzoo.core.advantages import AdvantageInputs
from rlzoo.core.errors import UserError
from rlzoo.core.reductions import StepCounts
from rlzoo.integrations.verl import policy_loss
from rlzoo.journal.rollout_file import turns
from tests.downstream.shared import (
    assert_same_gradient,
    flat_gradient,
    fresh,
    learner_gradient,
    page_block,
    row_log_probs,
    supported,
)
from tests.off_policy import make_model, off_policy_batch
from tests.published.shared import MAX_LENGTH, assert_agree, ours, shared_inputs
from tests.published.test_verl_losses import MODES, config_of, theirs

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
ZOO = load_zoo()
TAKEN = [name for name in supported(ZOO, ["turn_ids"]) if name != "opd"]
DRAWS = ("clip-cov",)  # random: verl does not pass the step


def mode_of(policy):
    return MODES[policy.reduction]


def inputs_of(policy, **replaced):
    """Return ragged off-policy inputs in verl's format: gaps in the mask separate turns, and there are no sampler log-probs."""
    inputs = dataclasses.replace(shared_inputs(policy), rollout_log_probs=None, **replaced)
    return dataclasses.replace(inputs, turn_ids=turns(inputs.response_mask))


def through_verl(name, inputs, mode, weights=None, **info):
    """Return loss, gradient and metrics of a registered loss, called as in verl: in float32, with per-token advantages."""
    log_probs = inputs.log_probs.detach().clone().requires_grad_()
    loss, metrics = get_policy_loss_fn(name)(
        old_log_prob=inputs.old_log_probs, log_prob=log_probs, advantages=inputs.advantages.expand(log_probs.shape).clone(),
        response_mask=inputs.response_mask, loss_agg_mode=mode, config=config_of({}, **info), rollout_is_weights=weights,
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return loss.item(), gradient.double(), metrics


def test_rules_without_needs_and_turn_rules_are_supported():
    assert {"fspo", "grpo", "gspo", "m2po", "fspo-turn", "turn-ratio"} <= set(TAKEN)
    assert {"fspo-adaptive", "gvpo", "top-entropy"}.isdisjoint(TAKEN)


@pytest.mark.parametrize("reduction", MODES)
@pytest.mark.parametrize("name", [name for name in TAKEN if name not in DRAWS])
def test_a_loss_equals_reduce_objective(name, reduction):
    if ZOO[name].scope == "sequence" and reduction == "token_mean":
        return  # rejected, see below
    policy = ZOO[name](reduction=reduction)
    inputs = inputs_of(policy)
    loss, gradient, _ = through_verl(f"rlzoo:{name}", inputs, MODES[reduction])
    assert_agree((loss, gradient), ours(policy, inputs), 1e-6)
    if policy.scope != "batch":  # a micro-batch of a larger step on two devices, whose gradients verl averages
        info = {"dp_size": 2, "batch_num_tokens": 1000, "global_batch_size": 50}
        loss, gradient, _ = through_verl(f"rlzoo:{name}", inputs, MODES[reduction], **info)
        assert_agree((loss / 2, gradient / 2), ours(policy, inputs, StepCounts(50, 1000)), 1e-6)


@pytest.mark.parametrize("mode", [*MODES.values(), "token-sum"])
def test_the_loss_of_grpo_equals_verls_vanilla(mode, monkeypatch):
    inputs = inputs_of(ZOO["grpo"](dual_clip=3.0))
    monkeypatch.setitem(MODES, "this", mode)
    for info in ({}, {"dp_size": 2, "batch_num_tokens": 1000, "global_batch_size": 50}):
        loss, gradient, metrics = through_verl("rlzoo:grpo/dual_clip:3.0", inputs, mode, **info)
        assert_agree(theirs("vanilla", inputs, "this", {}, **info), (loss, gradient))
    assert 0.1 < metrics["actor/pg_clipfrac"] < 0.4


def test_settings_in_the_name_reach_the_rule():
    inputs = inputs_of(ZOO["grpo"]())
    narrow = through_verl("rlzoo:grpo/clip_low:0.01/clip_high:0.02", inputs, "seq-mean-token-mean")
    assert_agree(narrow[:2], ours(ZOO["grpo"](clip_low=0.01, clip_high=0.02), inputs), 1e-6)
    assert narrow[2]["actor/pg_clipfrac"] > through_verl("rlzoo:grpo", inputs, "seq-mean-token-mean")[2]["actor/pg_clipfrac"]


def test_rollout_weights_multiply_the_objective():
    inputs = inputs_of(ZOO["grpo"]())
    weights = torch.rand(inputs.log_probs.shape, generator=torch.Generator().manual_seed(0)) + 0.5
    log_probs = inputs.log_probs.detach().clone().requires_grad_()
    advantages = inputs.advantages.expand(log_probs.shape)
    loss, _ = get_policy_loss_fn("vanilla")(
        inputs.old_log_probs, log_probs, advantages, inputs.response_mask, "token-mean", config_of({}), weights
    )
    (gradient,) = torch.autograd.grad(loss, log_probs)
    got = through_verl("rlzoo:grpo/dual_clip:3.0", inputs, "token-mean", weights)
    assert_agree((loss.item(), gradient), got[:2])
    # one weight per response works for a rule per response, but one per token does not
    column = weights[:, :1]
    scaled = dataclasses.replace(inputs, advantages=inputs.advantages * column)
    got = through_verl("rlzoo:gspo", inputs, "seq-mean-token-mean", column.expand(weights.shape).clone())
    assert_agree(got[:2], ours(ZOO["gspo"](), scaled), 1e-6)
    with pytest.raises(UserError, match="weights for gspo differ between the tokens"):
        through_verl("rlzoo:gspo", inputs, "seq-mean-token-mean", weights)


@pytest.mark.parametrize(
    ("name", "mode", "info", "message"),
    [("fspo", "token-mean", {}, r"set actor\.loss_agg_mode=seq-mean-token-mean"),
     ("grpo", "seq-mean-token-sum-norm", {"loss_scale_factor": None}, r"set actor\.loss_scale_factor"),
     ("m2po", "token-mean", {"batch_num_tokens": 10_000}, "m2po needs a whole step"),
     ("grpo", "token-mean", {"dp_size": 2}, "are needed when dp_size > 1"),
     ("fspo-adaptive", "token-mean", {}, "fspo-adaptive adapts its band after every update, but verl keeps no state"),
     ("gvpo", "token-mean", {}, "gvpo needs group_ids, rewards, which verl does not pass to a loss"),
     ("opd", "token-mean", {}, "opd is meant for reverse_kl advantages, which need .*, but verl computes advantages from rew"),
     ("top-entropy", "token-mean", {}, "top-entropy needs old_entropy"),
     ("grpo/reduction:token_mean", "token-mean", {}, r"reduction:token_mean would be ignored; set actor\.loss_agg_mode"),
     ("grpo/advantage:raw", "token-mean", {}, r"advantage:raw would be ignored; set algorithm\.adv_estimator"),
     ("grpo/clip_lo:0.1", "token-mean", {}, "unknown key 'rlzoo:grpo/clip_lo'.*did you mean 'clip_low'"),
     ("grpo/clip_low:5", "token-mean", {}, "rlzoo:grpo/clip_low=5: input should be less than 1"),
     ("grpo/clip_low", "token-mean", {}, "expected /key:value settings"),
     ("grop", "token-mean", {}, "unknown rule 'grop'.*did you mean 'grpo'")],
)  # fmt: skip
def test_settings_that_would_be_wrong_or_ignored_are_rejected(name, mode, info, message):
    with pytest.raises(UserError, match=message):
        through_verl(f"rlzoo:{name}", inputs_of(ZOO["grpo"]()), mode, **info)


def test_advantages_that_differ_within_a_response_are_refused_for_a_rule_per_response():
    inputs = inputs_of(ZOO["fspo"]())
    uneven = dataclasses.replace(inputs, advantages=torch.rand(inputs.log_probs.shape))
    with pytest.raises(UserError, match="advantages for fspo differ between the tokens"):
        through_verl("rlzoo:fspo", uneven, "seq-mean-token-mean")


def test_names_without_the_prefix_belong_to_verl():
    with pytest.raises(ValueError, match="Unsupported loss mode: fspo"):
        get_policy_loss_fn("fspo")
    with pytest.raises(ValueError, match="Unknown advantage estimator"):
        get_adv_estimator_fn("group_norm")


def test_an_external_rule_is_supported():
    outside = type("Outside", (ZOO["sapo"],), {"name": "outside", "__module__": __name__})()
    inputs = inputs_of(outside)
    log_probs = inputs.log_probs.detach().clone().requires_grad_()
    value, _ = policy_loss(outside)(
        inputs.old_log_probs, log_probs, inputs.advantages.expand(log_probs.shape), inputs.response_mask,
        "seq-mean-token-mean", config_of({}),
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(value, log_probs)
    assert_agree(theirs("sapo", inputs, "sequence_mean", {}), (value.item(), gradient))


@pytest.mark.parametrize(
    "settings",
    [{}, {"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_USE_EXTERNAL_MODULES": "rlzoo.integrations.verl"}],
    ids=["entry point", "VERL_USE_EXTERNAL_MODULES"],
)
def test_verl_finds_the_losses_without_importing_rlzoo(settings, tmp_path):
    code = "from verl.trainer.ppo.core_algos import get_policy_loss_fn as get; print(get('rlzoo:fspo').__module__)"
    environment = {**os.environ, **settings}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False,
                          cwd=tmp_path, env=environment)  # fmt: skip
    assert done.stdout.split()[-1:] == ["rlzoo.integrations.verl"], done.stderr


# verl's own worker loss


def micro_batch(batch, rows, counts):
    """Return rows of a batch in the format of verl's trainer: without padding, with the counts of the whole step."""

    def nested(values):
        return torch.nested.as_nested_tensor(values, layout=torch.jagged)

    sizes = [len(batch.sequences[row]) - int(batch.prompt_lengths[row]) for row in rows]
    pairs = list(zip(rows, sizes, strict=True))
    data = TensorDict({
        "prompts": nested([batch.sequences[row][:-size] for row, size in pairs]),
        "responses": nested([batch.sequences[row][-size:] for row, size in pairs]),
        "response_mask": nested([batch.response_mask[row, :size].long() for row, size in pairs]),
        "old_log_probs": nested([batch.old_log_probs[row, :size] for row, size in pairs]),
        "advantages": nested([batch.advantages[row].expand(size).contiguous() for row, size in pairs]),
    }, batch_size=[len(rows)])  # fmt: skip
    assign_non_tensor(data, dp_size=1, batch_num_tokens=counts.num_tokens, global_batch_size=counts.num_responses)
    return data


def worker_config(name, policy):
    return config_of({"loss_mode": name, "loss_agg_mode": mode_of(policy), "loss_scale_factor": 30})


def worker_backward(model, name, policy, batch, num_micro_batches):
    """Run the backward passes of one optimizer step through `ppo_loss`; returns its metrics, joined as in verl's worker."""
    counts, config, metrics = StepCounts.of(batch.response_mask), worker_config(name, policy), {}
    for rows in map(torch.Tensor.tolist, torch.arange(len(batch)).chunk(num_micro_batches)):
        # each token's log-prob is at the position before it
        packed = torch.cat([
            torch.cat([row_log_probs(model, batch.sequences[row]), torch.zeros(1)]) for row in rows
        ])  # fmt: skip
        loss, found = ppo_loss(config, {"log_probs": packed}, micro_batch(batch, rows, counts))
        loss.backward()
        for key, value in found.items():
            metrics.setdefault(key, Metric(value.aggregation)).append(value)
    return reduce_metrics(metrics)


@pytest.mark.parametrize("name", [name for name in TAKEN if name not in DRAWS])
def test_the_gradient_through_verl_equals_that_of_the_rlzoo_learner(name):
    model = make_model()
    policy = ZOO[name]()
    policy = policy.scaled(0.1) if policy.ratio_to_sampler else policy
    batch = off_policy_batch(model, policy)
    expected = learner_gradient(model, policy, batch)
    settings = "".join(f"/{key}:{value}" for key, value in policy.model_dump(exclude_defaults=True).items())
    trained = fresh(model)
    metrics = worker_backward(trained, f"rlzoo:{name}{settings}", policy, batch, 1 if policy.scope == "batch" else 4)
    assert_same_gradient(flat_gradient(trained), expected)
    responses = sum(metrics[f"actor/length_bin_{index}_responses"] for index in range(6))
    assert responses * (1 if policy.scope == "batch" else 4) == 15  # the advantages of three of 18 are 0


def test_verls_kl_and_entropy_are_added_to_the_rules_loss():
    model, policy = make_model(), ZOO["fspo"]()
    batch = off_policy_batch(model, policy)
    counts, rows = StepCounts.of(batch.response_mask), list(range(len(batch)))
    packed = torch.cat([torch.cat([row_log_probs(model, batch.sequences[row]), torch.zeros(1)]) for row in rows]).detach()
    entropy = torch.full_like(packed, 0.7)
    losses = []
    for settings in ({}, {"use_kl_loss": True, "kl_loss_coef": 0.5, "kl_loss_type": "k2", "entropy_coeff": 0.1}):
        data = micro_batch(batch, rows, counts)
        data["ref_log_prob"] = data["old_log_probs"]
        config = config_of({"loss_mode": "rlzoo:fspo", "loss_agg_mode": mode_of(policy), **settings})
        losses.append(ppo_loss(config, {"log_probs": packed, "entropy": entropy}, data)[0].item())
    # the mean over responses of the mean over tokens of k1^2 / 2, in float64
    mask, current = batch.response_mask, torch.zeros(batch.response_mask.shape, dtype=torch.float64)
    with torch.no_grad():
        for row, sequence in enumerate(batch.sequences):
            size = len(sequence) - int(batch.prompt_lengths[row])
            current[row, :size] = row_log_probs(model, sequence)[-size:]
    squares = torch.where(mask, (current - batch.old_log_probs).square() / 2, 0.0)
    kl = float((squares.sum(1) / mask.sum(1)).mean())
    assert losses[1] - losses[0] == pytest.approx(0.5 * kl - 0.1 * 0.7, rel=1e-4)


def test_two_optimizer_steps_through_verls_worker_loss():
    model = fresh(make_model())
    policy = ZOO["fspo"](width_low=0.02)
    batch = off_policy_batch(model, policy)
    with torch.no_grad():  # as in verl before the first step
        for row, sequence in enumerate(batch.sequences):
            size = len(sequence) - int(batch.prompt_lengths[row])
            batch.old_log_probs[row, :size] = row_log_probs(model, sequence)[-size:]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = torch.cat([weight.detach().flatten().clone() for weight in model.parameters()])
    rows = []
    for _ in range(2):
        optimizer.zero_grad()
        rows.append(worker_backward(model, "rlzoo:fspo/width_low:0.02", policy, batch, 3))
        optimizer.step()
    after = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    assert not torch.equal(before, after)
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert rows[0]["actor/pg_clipfrac"] == 0  # nothing has changed yet
    assert rows[1]["actor/pg_clipfrac"] > 0
    assert rows[1]["actor/pg_loss"] < rows[0]["actor/pg_loss"]


def test_clip_counts_by_length_cover_the_step():
    # responses of 3, 70 and 300 tokens: the first two bins and the third; a log-ratio of 1 on the first token
    mask = torch.arange(300) < torch.tensor([3, 70, 300, 2])[:, None]
    old = torch.zeros(mask.shape)
    log_probs = torch.zeros(mask.shape).index_put_((torch.tensor([0, 2, 3]), torch.tensor([0, 0, 0])), torch.tensor(1.0))
    advantages = torch.tensor([[1.0], [1.0], [1.0], [0.0]]).expand(mask.shape)
    _, metrics = get_policy_loss_fn("rlzoo:rloo")(
        old, log_probs.requires_grad_(), advantages, mask, "seq-mean-token-mean", config_of({})
    )
    assert [metrics[f"actor/length_bin_{index}_responses"] for index in range(6)] == [1, 1, 1, 0, 0, 0]
    assert [metrics[f"actor/length_bin_{index}_clipped"] for index in range(6)] == [1, 0, 1, 0, 0, 0]
    assert metrics["actor/pg_clipfrac"] == pytest.approx((3 + 300) / 375)  # nothing is clipped where A = 0


# advantage estimators

OUTCOMES = torch.tensor([1.0, 0.0, 0.5, 1.0, 1.0, 0.0])
UIDS = np.array(["b", "a", "b", "a", "a", "b"], dtype=object)


def outcome_rewards(rewards, lengths, width=8):
    """Return rewards in verl's format: the reward of a response is on its last token."""
    values = torch.zeros(len(rewards), width)
    values[torch.arange(len(rewards)), torch.tensor(lengths) - 1] = rewards
    return values, torch.arange(width) < torch.tensor(lengths)[:, None]


@pytest.mark.parametrize("name", ["group_norm", "group_mean", "leave_one_out", "max_rl", "pass@2", "batch_norm", "raw"])
def test_an_estimator_equals_that_of_rlzoo(name):
    token_rewards, mask = outcome_rewards(OUTCOMES, [3, 8, 1, 5, 2, 8])
    got, returns = get_adv_estimator_fn(f"rlzoo:{name}")(
        token_level_rewards=token_rewards, response_mask=mask.long(), config=None, index=UIDS
    )
    groups = torch.tensor([1, 0, 1, 0, 0, 1])[:, None]
    expected = ZOO.advantages.build("here", name)(AdvantageInputs(OUTCOMES[:, None], groups, mask))
    assert torch.equal(got, torch.where(mask, expected, 0.0))
    assert torch.equal(returns, got)


def test_estimators_equal_those_of_verl():
    token_rewards, mask = outcome_rewards(OUTCOMES, [3, 8, 1, 5, 2, 8])
    for mine, theirs_ in (("group_norm", "grpo"), ("leave_one_out", "rloo")):
        given = {"token_level_rewards": token_rewards, "response_mask": mask.long(), "index": UIDS, "config": None}
        got, expected = (get_adv_estimator_fn(name)(**given)[0] for name in (f"rlzoo:{mine}", theirs_))
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_token_rewards_are_passed_on_or_summed_as_the_estimator_requires():
    # the second response earns 0.5 in its first turn, and 1 on an environment's token after its second turn
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 0]])
    paid = torch.tensor([[0.0, 0, 2, 0], [0.5, 0, 0, 1.0]])
    given = {"token_level_rewards": paid, "response_mask": mask, "index": np.array(["a", "a"]), "config": None}
    raw, _ = get_adv_estimator_fn("rlzoo:raw")(**given)
    assert raw.tolist() == [[2, 2, 2, 0], [1.5, 0, 1, 0]]
    centred, _ = get_adv_estimator_fn("rlzoo:group_mean")(**given)
    assert centred.tolist() == [[0.25, 0.25, 0.25, 0], [-0.25, 0, -0.25, 0]]


@pytest.mark.parametrize(
    ("name", "index", "message"),
    [("gigpo", UIDS, "'gigpo' needs state_ids, which verl does not pass"),
     ("reverse_kl", UIDS, "needs old_log_probs, ref_log_probs"),
     ("group_norm", None, "compares the responses to one prompt, but the batch has no uid"),
     ("leave_one_out", np.arange(6), "at least 2 responses per prompt, not 1"),
     ("pass_at_k/k:9", UIDS, "at least 9 responses per prompt, not 3"),
     ("pass_at_k/n:9", UIDS, "unknown key .*pass_at_k/n"),
     ("group", UIDS, "unknown advantage estimator 'group'")],
)  # fmt: skip
def test_an_estimator_that_cannot_estimate_is_refused(name, index, message):
    token_rewards, mask = outcome_rewards(OUTCOMES, [3, 8, 1, 5, 2, 8])
    with pytest.raises(UserError, match=message):
        get_adv_estimator_fn(f"rlzoo:{name}")(token_level_rewards=token_rewards, response_mask=mask, config=None, index=index)


def test_the_trainer_of_verl_accepts_an_rlzoo_estimator():
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import compute_advantage

    token_rewards, mask = outcome_rewards(OUTCOMES, [3, 8, 1, 5, 2, 8])
    data = DataProto.from_dict({"token_level_rewards": token_rewards, "response_mask": mask.long()}, non_tensors={"uid": UIDS})
    done = compute_advantage(data, "rlzoo:group_mean")
    means = {"a": 2 / 3, "b": 0.5}
    expected = torch.tensor([float(reward) - means[uid] for reward, uid in zip(OUTCOMES, UIDS, strict=True)])
    torch.testing.assert_close(done.batch["advantages"], torch.where(mask, expected[:, None], 0.0))


def test_the_code_on_the_page_runs(capsys):
    exec(page_block("verl.md"), {})
    assert "actor/pg_clipfrac" in capsys.readouterr().out


def test_constant_length_does_not_use_the_batch_width():
    policy = ZOO["grpo"](reduction="constant_length")
    inputs = inputs_of(policy)
    got = through_verl("rlzoo:grpo", inputs, "seq-mean-token-sum-norm", loss_scale_factor=100)
    assert_agree(got[:2], ours(policy, inputs, max_length=100))
    assert MAX_LENGTH != 100
