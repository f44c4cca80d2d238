"""The adapter in examples/: any clip policy as a policy loss of verl."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import verl_policy_loss
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils.tensordict_utils import assign_non_tensor
from verl.workers.utils.losses import ppo_loss

from rlzoo import ClipPolicy, load_zoo
from rlzoo.reductions import StepCounts
from tests.published.shared import MAX_LENGTH, assert_agree, ours, shared_inputs
from tests.published.test_verl_losses import MODES, config_of, theirs

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # transformers' own deprecations
ZOO = load_zoo()
TAKEN = [name for name, policy in ZOO.items() if policy.updated is ClipPolicy.updated and not policy.needs]


def through_verl(policy, inputs, mode, weights=None, **info):
    """Loss, gradient and metrics of the adapter, called as verl calls it: float32, advantages per token."""
    name = verl_policy_loss.register(policy.name, **policy.model_dump())
    log_probs = inputs.log_probs.detach().clone().requires_grad_()
    loss, metrics = get_policy_loss_fn(name)(
        old_log_prob=inputs.old_log_probs, log_prob=log_probs, advantages=inputs.advantages.expand(log_probs.shape).clone(),
        response_mask=inputs.response_mask, loss_agg_mode=mode, config=config_of({}, **info), rollout_is_weights=weights,
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return loss.item(), gradient.double(), metrics


@pytest.mark.parametrize("reduction", MODES)
@pytest.mark.parametrize("name", [name for name in TAKEN if name != "clip-cov"])
def test_the_verl_loss_equals_reduce_objective(name, reduction):
    if ZOO[name].scope == "sequence" and reduction == "token_mean":
        return  # refused, see below
    policy = ZOO[name](reduction=reduction)
    inputs = dataclasses.replace(shared_inputs(policy), rollout_log_probs=None)
    loss, gradient, _ = through_verl(policy, inputs, MODES[reduction])
    assert_agree((loss, gradient), ours(policy, inputs), 1e-6)
    if policy.scope != "batch":  # a micro-batch of a larger step on two devices, whose gradients verl averages
        info = {"dp_size": 2, "batch_num_tokens": 1000, "global_batch_size": 50}
        loss, gradient, _ = through_verl(policy, inputs, MODES[reduction], **info)
        assert_agree((loss / 2, gradient / 2), ours(policy, inputs, StepCounts(50, 1000)), 1e-6)


@pytest.mark.parametrize("mode", [*MODES.values(), "token-sum"])
def test_the_verl_loss_of_grpo_equals_verls_vanilla(mode, monkeypatch):
    policy = ZOO["grpo"](dual_clip=3.0)
    inputs = shared_inputs(policy)
    monkeypatch.setitem(MODES, "this", mode)
    for info in ({}, {"dp_size": 2, "batch_num_tokens": 1000, "global_batch_size": 50}):
        loss, gradient, metrics = through_verl(policy, inputs, mode, **info)
        assert_agree(theirs("vanilla", inputs, "this", {}, **info), (loss, gradient))
    assert 0.1 < metrics["actor/pg_clipfrac"] < 0.4


def test_the_verl_loss_takes_rollout_weights():
    inputs = shared_inputs(ZOO["grpo"]())
    weights = torch.rand(inputs.log_probs.shape, generator=torch.Generator().manual_seed(0)) + 0.5
    log_probs = inputs.log_probs.detach().clone().requires_grad_()
    advantages = inputs.advantages.expand(log_probs.shape)
    loss, _ = get_policy_loss_fn("vanilla")(
        inputs.old_log_probs, log_probs, advantages, inputs.response_mask, "token-mean", config_of({}), weights
    )
    (gradient,) = torch.autograd.grad(loss, log_probs)
    got = through_verl(ZOO["grpo"](dual_clip=3.0), inputs, "token-mean", weights)
    assert_agree((loss.item(), gradient), got[:2])
    # one weight per response suits a rule per response; one per token does not
    column = weights[:, :1]
    scaled = dataclasses.replace(inputs, advantages=inputs.advantages * column)
    got = through_verl(ZOO["gspo"](), inputs, "seq-mean-token-mean", column.expand(weights.shape).clone())
    assert_agree(got[:2], ours(ZOO["gspo"](), scaled), 1e-6)
    with pytest.raises(ValueError, match="weights for gspo differ between the tokens"):
        through_verl(ZOO["gspo"](), inputs, "seq-mean-token-mean", weights)


def test_the_verl_loss_refuses_what_it_would_get_wrong():
    inputs = shared_inputs(ZOO["fspo"]())
    with pytest.raises(ValueError, match=r"set actor\.loss_agg_mode=seq-mean-token-mean"):
        through_verl(ZOO["fspo"](), inputs, "token-mean")
    uneven = dataclasses.replace(inputs, advantages=torch.rand(inputs.log_probs.shape))
    with pytest.raises(ValueError, match="advantages for fspo differ between the tokens"):
        through_verl(ZOO["fspo"](), uneven, "seq-mean-token-mean")
    with pytest.raises(ValueError, match="m2po judges a whole step"):
        through_verl(ZOO["m2po"](), inputs, "token-mean", batch_num_tokens=10_000)
    with pytest.raises(ValueError, match="are needed when dp_size > 1"):
        through_verl(ZOO["grpo"](), inputs, "token-mean", dp_size=2)
    with pytest.raises(ValueError, match="fspo-adaptive adapts to the run"):
        verl_policy_loss.register("fspo-adaptive")
    with pytest.raises(ValueError, match="turn-ratio needs turn_ids"):
        verl_policy_loss.register("turn-ratio")


def test_the_verl_loss_of_a_rule_from_outside_the_tree():
    outside = type("Outside", (ZOO["sapo"],), {"name": "outside", "__module__": __name__})()
    inputs = shared_inputs(outside)
    loss = verl_policy_loss.policy_loss(outside)
    log_probs = inputs.log_probs.detach().clone().requires_grad_()
    value, _ = loss(inputs.old_log_probs, log_probs, inputs.advantages.expand(log_probs.shape), inputs.response_mask,
                    "seq-mean-token-mean", config_of({}))  # fmt: skip
    (gradient,) = torch.autograd.grad(value, log_probs)
    assert_agree(theirs("sapo", inputs, "sequence_mean", {}), (value.item(), gradient))


def test_verl_finds_the_loss_in_a_module_named_by_its_environment_variable(tmp_path):
    (tmp_path / "my_rules.py").write_text('from verl_policy_loss import register\n\nregister("fspo", width_low=0.02)\n')
    examples = Path(verl_policy_loss.__file__).parent
    path = os.pathsep.join([str(tmp_path), str(examples)])
    code = "from verl.trainer.ppo.core_algos import get_policy_loss_fn as get; print(get('rlzoo-fspo').__module__)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": path, "VERL_USE_EXTERNAL_MODULES": "my_rules"},
    )  # fmt: skip
    assert done.stdout.split() == ["verl_policy_loss"]


def test_verls_worker_computes_the_loss():
    # its own `ppo_loss`, which finds the function by `loss_mode` and hands it what a worker has
    policy = ZOO["fspo"]()
    inputs = shared_inputs(policy)
    mask, size = inputs.response_mask, len(inputs.response_mask)
    prompt = torch.ones(size, 2, dtype=torch.long)
    data = TensorDict({
        "prompts": prompt, "responses": torch.ones(mask.shape, dtype=torch.long), "response_mask": mask.long(),
        "attention_mask": torch.cat([prompt, mask.long()], 1), "old_log_probs": inputs.old_log_probs,
        "advantages": inputs.advantages.expand(mask.shape).clone(),
    }, batch_size=[size])  # fmt: skip
    assign_non_tensor(data, dp_size=1, batch_num_tokens=int(mask.sum()), global_batch_size=size)
    log_probs = inputs.log_probs.detach().clone().requires_grad_()
    # without padding, and each response one place early, since a token's log-prob comes from the position before it
    zero = torch.zeros(1)
    packed = torch.cat([torch.cat([zero, log_probs[row][mask[row]], zero]) for row in range(size)])
    config = config_of({"loss_mode": verl_policy_loss.register("fspo"), "loss_agg_mode": "seq-mean-token-mean"})
    loss, metrics = ppo_loss(config, {"log_probs": packed}, data)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert_agree((loss.item(), gradient), ours(policy, inputs))
    assert metrics["actor/pg_clipfrac"].aggregate() > 0.1


def test_the_verl_loss_divides_by_verls_scale_factor():
    policy = ZOO["grpo"](reduction="constant_length")
    inputs = shared_inputs(policy)
    got = through_verl(policy, inputs, "seq-mean-token-sum-norm", loss_scale_factor=None)
    assert_agree(got[:2], ours(policy, inputs, max_length=MAX_LENGTH))  # the width of the padded batch
    got = through_verl(policy, inputs, "seq-mean-token-sum-norm", loss_scale_factor=100)
    assert_agree(got[:2], ours(policy, inputs, max_length=100))
