"""Tests rlzoo's losses for Tinker with the real package: its `Datum`, and its client's code for custom losses."""

import inspect
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tinker import Datum, ModelInput, TrainingClient
from tinker.types import TensorData

from examples.tinker_loss import loss_fn
from rlzoo import load_zoo
from rlzoo.core.errors import UserError
from tests.downstream.shared import (
    WIDTH,
    assert_same_gradient,
    flat_gradient,
    fresh,
    learner_gradient,
    page_block,
    row_log_probs,
    supported,
)
from tests.off_policy import make_model, off_policy_batch

ZOO = load_zoo()
TAKEN = supported(ZOO, ["turn_ids", "group_ids", "rewards", "max_length"])
DRAWS = ("clip-cov",)  # random: Tinker does not pass the step


def datum(tokens, logprobs, advantages, mask):
    """Return a datum like tinker-cookbook's `trajectory_to_data`: all values except the input's are shifted left by one."""
    columns = {"logprobs": logprobs, "advantages": advantages, "mask": mask}
    return Datum(
        model_input=ModelInput.from_ints(tokens.tolist()[:-1]),
        loss_fn_inputs={
            "target_tokens": TensorData.from_torch(tokens[1:]),
            **{key: TensorData.from_torch(values[1:].float().contiguous()) for key, values in columns.items()},
        },
    )


def data_of(batch):
    data = []
    for row, sequence in enumerate(batch.sequences):
        prompt, size = int(batch.prompt_lengths[row]), len(sequence)

        def whole(values, prompt=prompt, size=size):
            return torch.cat([torch.zeros(prompt), values[: size - prompt].float()])

        mask = whole(batch.response_mask[row])
        data.append(datum(sequence, whole(batch.old_log_probs[row]), batch.advantages[row] * mask, mask))
    return data


def forward_backward_custom(model, data, loss):
    """Do what Tinker's client does: a forward pass, the custom loss with its own code, and a backward pass of its weights.

    The model replaces the server: log-probs of the target tokens, then sum(-logprobs * weights).
    """
    rows = [
        row_log_probs(model, torch.tensor([*datum.model_input.to_ints(), int(datum.loss_fn_inputs["target_tokens"].data[-1])]))
        for datum in data
    ]
    answer = SimpleNamespace(loss_fn_outputs=[{"logprobs": TensorData.from_torch(row.detach())} for row in rows])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        done = TrainingClient._compute_custom_loss(data, loss, answer)
    for row, linear in zip(rows, done.data, strict=True):
        (-row * linear.loss_fn_inputs["weights"].to_torch()).sum().backward()
    return done


def made(name, batch, **settings):
    given = {"group_ids": batch.group_ids.tolist(), "rewards": batch.rewards.tolist(), "max_length": WIDTH}
    needed = {key: value for key, value in given.items() if key in ZOO[name].needs or key == "max_length"}
    return loss_fn(name, **needed, **settings)


def narrow(policy):
    return policy.scaled(0.1) if policy.ratio_to_sampler else policy


def test_turn_and_group_rules_are_supported():
    assert {"fspo", "grpo", "m2po", "fspo-turn", "gvpo", "real"} <= set(TAKEN)
    assert {"fspo-adaptive", "top-entropy"}.isdisjoint(TAKEN)


@pytest.mark.parametrize("name", [name for name in TAKEN if name not in DRAWS])
def test_the_gradient_through_tinker_equals_that_of_the_rlzoo_learner(name):
    model, policy = make_model(), narrow(ZOO[name]())
    batch = off_policy_batch(model, policy)
    trained = fresh(model)
    done = forward_backward_custom(trained, data_of(batch), made(name, batch, **policy.model_dump(exclude_defaults=True)))
    assert_same_gradient(flat_gradient(trained), learner_gradient(model, policy, batch))
    assert all(isinstance(value, float) for value in done.metrics.values())


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "sequence_mean_token_sum", "constant_length"])
def test_the_reduction_is_that_of_the_rule(reduction):
    model, policy = make_model(), ZOO["grpo"](reduction=reduction)
    batch = off_policy_batch(model, policy)
    trained = fresh(model)
    forward_backward_custom(trained, data_of(batch), loss_fn("grpo", reduction=reduction, max_length=WIDTH))
    assert_same_gradient(flat_gradient(trained), learner_gradient(model, policy, batch))


def test_two_optimizer_steps():
    model = fresh(make_model())
    batch = off_policy_batch(model, ZOO["fspo"]())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(forward_backward_custom(model, data_of(batch), loss_fn("fspo/width_low:0.02")).loss_sum)
        optimizer.step()
    assert losses[1] < losses[0]


def hand_worked():
    """Two responses of two and one tokens to a prompt of two tokens; log-ratios 0.4 and -0.1, then -0.7."""
    data = [
        datum(torch.tensor([7, 8, 3, 4]), torch.tensor([0, 0, -1.0, -2.0]), torch.tensor([0, 0, 1.0, 1]),
              torch.tensor([0, 0, 1.0, 1])),
        datum(torch.tensor([7, 8, 5]), torch.tensor([0, 0, -1.0]), torch.tensor([0, 0, -1.0]), torch.tensor([0, 0, 1.0])),
    ]  # fmt: skip
    return data, [torch.tensor([-5.0, -0.6, -2.1], requires_grad=True), torch.tensor([-5.0, -1.7], requires_grad=True)]


def test_loss_gradient_and_metrics_of_a_batch_worked_by_hand():
    data, logprobs = hand_worked()
    loss, metrics = loss_fn("grpo", clip_low=0.2, clip_high=0.2)(data, logprobs)
    second = torch.tensor(-0.1).exp().item()
    # the mean over two responses of the mean over tokens: (1.2 + e^-0.1) / 2 and -0.8, the lowest ratio
    assert loss.item() == pytest.approx(-((1.2 + second) / 2 - 0.8) / 2, rel=1e-6)
    loss.backward()
    assert logprobs[0].grad.tolist() == pytest.approx([0, 0, -second / 4], rel=1e-6)
    assert logprobs[1].grad.tolist() == [0, 0]
    assert metrics["clip/fraction"] == pytest.approx((0.5 + 1) / 2)
    # acceptance 0.5 where A > 0 and 0 where A < 0; both lengths are compared at the same shares of signs, so they are even
    assert metrics["fairness/lre_max"] == pytest.approx(0.0)
    assert {metrics[f"clip/fraction_length_bin_{k}"] for k in (0, 5)} == {1.0, 0.5}


def test_a_batch_without_advantages_has_no_metrics():
    data, logprobs = hand_worked()
    idle = [
        Datum(model_input=each.model_input, loss_fn_inputs={**each.loss_fn_inputs, "advantages": TensorData.from_torch(zero)})
        for each, zero in zip(data, (torch.zeros(3), torch.zeros(2)), strict=True)
    ]
    loss, metrics = loss_fn("grpo")(idle, logprobs)
    loss.backward()
    assert (loss.item(), metrics) == (0, {})


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [("fspo-adaptive", {}, "fspo-adaptive adapts its band after every update, but Tinker keeps no state for it"),
     ("top-entropy", {}, "top-entropy needs old_entropy, which Tinker does not pass to a loss"),
     ("gvpo", {}, "gvpo needs group_ids, rewards: pass group_ids= to loss_fn"),
     ("dppo-tv", {}, "dppo-tv has the reduction constant_length: pass max_length= to loss_fn"),
     ("grpo", {"advantage": "raw"}, r"would be ignored; set the values of loss_fn_inputs\[\"advantages\"\]"),
     ("grpo", {"clip_lo": 0.1}, "did you mean 'clip_low'")],
)  # fmt: skip
def test_settings_that_would_be_wrong_or_ignored_are_rejected(name, settings, message):
    with pytest.raises(UserError, match=message):
        loss_fn(name, **settings)


def test_data_without_a_key_or_with_uneven_values_are_rejected():
    data, logprobs = hand_worked()
    without = {key: value for key, value in data[1].loss_fn_inputs.items() if key != "mask"}
    bare = Datum(model_input=data[1].model_input, loss_fn_inputs=without)
    with pytest.raises(UserError, match=r'datum 1 has no loss_fn_inputs\["mask"\] \(it has: target_tokens, logprobs, adv'):
        loss_fn("grpo")([data[0], bare], logprobs)
    with pytest.raises(UserError, match="loss_fn got 1 group_ids for 2 data"):
        loss_fn("gvpo", group_ids=[0], rewards=[1.0, 0.0])(data, logprobs)
    uneven = [
        Datum(model_input=each.model_input, loss_fn_inputs={**each.loss_fn_inputs, "advantages": TensorData.from_torch(given)})
        for each, given in zip(data, (torch.tensor([0, 1.0, 2.0]), torch.tensor([0, 1.0])), strict=True)
    ]
    with pytest.raises(UserError, match="advantages for fspo differ between the tokens"):
        loss_fn("fspo")(uneven, logprobs)


def test_the_code_on_the_page_takes_a_step(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")  # where the example is beside the user's code
    # without tinker-cookbook, whose two functions it imports; the client receives their output
    text = page_block("tinker.md").replace(
        "from tinker_cookbook.rl.data_processing import assemble_training_data, compute_advantages\n", ""
    )
    model, batch = fresh(make_model()), off_policy_batch(make_model(), ZOO["fspo"]())
    names = {"assemble_training_data": lambda groups, advantages: (groups, []), "compute_advantages": lambda groups: None}
    exec(text, names)
    done = []

    def custom(data, loss):
        done.append(forward_backward_custom(model, data, loss))
        return SimpleNamespace(result=lambda: SimpleNamespace(metrics=done[0].metrics))

    client = SimpleNamespace(forward_backward_custom=custom, optim_step=done.append)
    metrics = names["train_step"](client, data_of(batch))
    assert 0 < metrics["clip/fraction"] < 1
    assert done[1].learning_rate == 1e-5


def test_the_signatures_match_those_of_tinker():
    parameters = inspect.signature(TrainingClient.forward_backward_custom).parameters
    assert list(parameters)[:3] == ["self", "data", "loss_fn"]
    assert list(inspect.signature(loss_fn("grpo")).parameters) == ["data", "logprobs"]
