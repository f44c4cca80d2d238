"""The critic's values, value targets and gradient, and the model's, equal float64 computations through the real learner."""

import copy
import dataclasses
import math

import pytest
import torch
from rlzoo_advantages import GAE
from rlzoo_grpo import GRPO

from rlzoo import UserError
from rlzoo.config.sections import CriticConfig, LaunchConfig, LearnerConfig
from rlzoo.core.errors import RunError
from rlzoo.learner.batch import AdvantageBatch, Batch
from rlzoo.learner.critic import Critic
from rlzoo.learner.learner import Learner
from rlzoo.learner.values import value_loss
from rlzoo.models.processes import make_accelerator
from tests import gae_oracle
from tests.core.test_gae import episodes
from tests.learner.test_learner import plain_gradient, relative_error
from tests.off_policy import PAD, VOCABULARY, make_model
from tests.rules import few


@pytest.fixture(scope="module")
def model():
    return make_model()


def make_head(seed=3, size=32):
    rng = torch.Generator().manual_seed(seed)
    return {"weight": 0.3 * torch.randn(1, size, generator=rng), "bias": torch.tensor([0.2])}


def episode_batch(seed=1, *, is_paid=True):
    """Return ragged episodes of one to five turns with holes; some are cut off, one has no tokens, and one has no grade."""
    inputs, rng = episodes(seed), torch.Generator().manual_seed(seed)
    number = len(inputs.rewards)
    lengths = [max([0, *(t + 1 for t in range(inputs.response_mask.shape[1]) if row[t])]) for row in inputs.response_mask]
    mask, prompts = inputs.response_mask[:, : max(lengths)], torch.randint(2, 9, (number,), generator=rng)
    sizes = [int(prompt) + length for prompt, length in zip(prompts, lengths, strict=True)]
    paid = torch.where(mask, inputs.values[:, : max(lengths)] / 3, 0.0).float()
    rewards = inputs.rewards[:, 0].float()
    rewards[4] = torch.nan
    return Batch(
        step=1,
        sequences=tuple(torch.randint(2, VOCABULARY, (size,), generator=rng) for size in sizes),
        prompt_lengths=prompts,
        response_mask=mask,
        turn_ids=inputs.turn_ids[:, : max(lengths)],
        rollout_log_probs=torch.zeros(mask.shape),
        rewards=rewards,
        group_ids=torch.arange(number),
        finished=inputs.finished[:, 0],
        turn_rewards=paid if is_paid else None,
    )


def make_learner(model, *, gae=None, critic=None, head=True, double=False, num_updates=10, padding_side="right", **settings):
    settings = LearnerConfig(**{"max_grad_norm": None, "lr": 1e-3, "num_minibatches": 1, **settings})
    accelerator = make_accelerator(LaunchConfig(), settings)
    shared = {"pad_id": PAD, "accelerator": accelerator}
    policy = GRPO(advantage={"name": "gae", **(gae or {})}, reduction="token_mean")
    network = copy.deepcopy(model)
    critic = Critic(
        copy.deepcopy(network),
        CriticConfig(**{"max_grad_norm": None, "lr": 1e-3, **(critic or {})}),
        settings,
        head=make_head() if head else None,
        **shared,
    )
    learner = Learner(network, policy, settings, max_length=40, num_updates=num_updates, critic=critic, **shared)
    learner.micro_batches.padding_side = critic.micro_batches.padding_side = padding_side
    if double:
        network.double()
        critic.module.double()
    return learner


@torch.no_grad()
def plain_values(model, batch, head=None):
    """Return float64 values before each token, ``(B, T)``, and after the last one, ``(B,)``: row by row, without our code."""
    model, head = copy.deepcopy(model).double(), head or make_head()
    weight, bias = head["weight"][0].double(), head["bias"].double()
    values, last = torch.zeros(batch.response_mask.shape, dtype=torch.float64), torch.zeros(len(batch), dtype=torch.float64)
    for row, sequence in enumerate(batch.sequences):
        states = model.model(input_ids=sequence[None]).last_hidden_state[0] @ weight + bias
        start = int(batch.prompt_lengths[row])
        values[row, : len(sequence) - start] = states[start - 1 : -1]
        last[row] = states[-1]
    return torch.where(batch.response_mask, values, 0.0), last


def plain_critic_gradient(model, batch, derivative):
    """Return the gradient of sum(derivative * values) in the weights of the model and of the head, row by row."""
    model, head = copy.deepcopy(model).double(), {name: value.double().requires_grad_() for name, value in make_head().items()}
    for row, sequence in enumerate(batch.sequences):
        states = model.model(input_ids=sequence[None]).last_hidden_state[0] @ head["weight"][0] + head["bias"]
        start = int(batch.prompt_lengths[row])
        (states[start - 1 : -1] * derivative[row, : len(sequence) - start]).sum().backward()
    return torch.cat([tensor.grad.flatten() for tensor in (*model.parameters(), *head.values())])


def critic_gradient(learner, batch):
    rows = torch.arange(len(batch))[batch.graded]
    loss = learner.critic.accumulate(batch, rows, int(batch.response_mask[rows].sum()))
    gradient = [parameter.grad.flatten() for parameter in learner.critic.module.parameters()]
    learner.critic.optimization.forget()
    return torch.cat(gradient), loss


def moved_from(batch, by=0.5):
    """Return the batch with other values from before the step, so that about a third of the values are clipped."""
    noise = torch.randn(batch.values.shape, generator=torch.Generator().manual_seed(9))
    return dataclasses.replace(batch, values=torch.where(batch.response_mask, batch.values + by * noise, 0.0))


@pytest.mark.parametrize(("is_double", "accuracy"), [(True, 1e-6), (False, 1e-5)])
@pytest.mark.parametrize(
    "gae",
    few(
        [
            {"lam": 0.8, "gamma": 0.95, "bootstrap_truncated": True},
            {"lam_alpha": 0.3, "lam_returns": 1.0, "whiten": False},
            {"time_step": "turn", "lam": 0.5},
        ]
    ),
)
def test_values_targets_and_both_gradients_equal_the_oracle(model, gae, is_double, accuracy):
    batch = episode_batch()
    learner = make_learner(model, gae=gae, double=is_double, max_tokens_per_micro_batch=60)
    got, (values, last) = learner.score(batch), plain_values(model, batch)
    torch.testing.assert_close(got.values.double(), values, rtol=accuracy, atol=accuracy)
    torch.testing.assert_close(got.last_values[:, 0].double(), last, rtol=accuracy, atol=accuracy)

    mask, graded = batch.response_mask & batch.graded[:, None], batch.graded.numpy()
    paid = batch.turn_rewards.double()
    arrays = [batch.rewards.double() - paid.sum(-1), values, last, batch.finished, batch.response_mask, batch.turn_ids, paid]
    advantages, targets = torch.zeros(mask.shape, dtype=torch.float64), torch.zeros(mask.shape, dtype=torch.float64)
    expected = gae_oracle.gae(*(array.numpy()[graded] for array in arrays), **{"whiten": True, **gae})
    advantages[batch.graded], targets[batch.graded] = map(torch.from_numpy, expected)
    torch.testing.assert_close(got.advantages.double(), advantages, rtol=accuracy, atol=accuracy)
    torch.testing.assert_close(got.value_targets.double(), targets, rtol=accuracy, atol=accuracy)

    moved = moved_from(got)
    loss, derivative = gae_oracle.value_loss(*(t.numpy() for t in (values, moved.values, targets, mask)), clip=0.2)
    assert 0.1 < (derivative[mask.numpy()] == 0).mean() < 0.6
    gradient, got_loss = critic_gradient(learner, moved)
    assert got_loss == pytest.approx(loss, rel=accuracy)
    assert relative_error(gradient.double(), plain_critic_gradient(model, batch, torch.from_numpy(derivative))) < accuracy

    learner.accumulate(got, torch.arange(len(batch)))
    ours = -torch.cat([parameter.grad.flatten() for parameter in learner.model.parameters()]).double()
    # at ratio 1, the derivative of the mean over the step's tokens is A / N
    expected = plain_gradient(model, batch, (torch.where(mask, advantages, 0.0) / batch.response_mask.sum()).numpy())
    assert relative_error(ours, expected) < accuracy


def test_the_clipped_loss_worked_by_hand():
    # R = 1, V_old = 0, clip .2: V = .1 and V = .3 and V = -.5; V' = .1, .2 and -.2
    values = torch.tensor([[0.1, 0.3, -0.5, 9.0]], requires_grad=True)
    mask = torch.tensor([[True, True, True, False]])
    loss = value_loss(values, torch.zeros(1, 4), torch.ones(1, 4), mask, 0.2)
    assert loss.item() == pytest.approx((0.9**2 + 0.8**2 + 1.5**2) / 2)
    loss.backward()
    torch.testing.assert_close(values.grad, torch.tensor([[-0.9, 0.0, -1.5, 0.0]]))


@pytest.mark.parametrize(
    "settings",
    [
        {"max_tokens_per_micro_batch": 1},
        {"max_tokens_per_micro_batch": 60, "padding_side": "left"},
        {"max_tokens_per_micro_batch": 100, "packing": True},
        {"gradient_checkpointing": True},
    ],
)
def test_the_gradient_does_not_depend_on_how_rows_are_computed(model, settings):
    batch = episode_batch()
    whole = make_learner(model, max_tokens_per_micro_batch=100_000)
    other = make_learner(model, **settings)
    scored, again = moved_from(whole.score(batch)), moved_from(other.score(batch))
    torch.testing.assert_close(again.values, scored.values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(again.last_values, scored.last_values, rtol=1e-5, atol=1e-5)
    (expected, loss), (got, got_loss) = critic_gradient(whole, scored), critic_gradient(other, scored)
    assert relative_error(got, expected) < 1e-5
    assert got_loss == pytest.approx(loss, rel=1e-5)


def weights_of(module):
    return torch.cat([parameter.detach().flatten().clone() for parameter in module.parameters()])


def test_the_critic_updates_as_often_as_configured_and_before_the_model(model):
    batch, rows = episode_batch(), torch.arange(12)
    learner = make_learner(model, critic={"updates": 2}, num_minibatches=2)
    twin = make_learner(model, critic={"updates": 2}, num_minibatches=2)
    scored, before = learner.score(batch), weights_of(learner.model)
    order = []
    learner.critic.optimization.optimizer.register_step_post_hook(lambda *_: order.append("critic"))
    learner.optimization.optimizer.register_step_post_hook(lambda *_: order.append("model"))
    learner.update(scored)
    assert order == ["critic", "critic", "model"] * 2
    assert len(learner.critic.updates) == 4
    for minibatch in twin.minibatches(batch, scored.seed):
        graded = minibatch[batch.graded[minibatch]]
        for _ in range(2):
            twin.critic.accumulate(scored, graded, int(batch.response_mask[graded].sum()))
            twin.critic.optimization.apply(None)
    assert torch.equal(weights_of(learner.critic.module), weights_of(twin.critic.module))
    assert not torch.equal(weights_of(learner.model), before)
    assert len(rows) == len(batch)


def test_the_model_rests_while_the_critic_warms_up(model):
    learner = make_learner(model, critic={"warmup_steps": 1}, num_minibatches=2, schedule="linear")
    batch, before, before_critic = episode_batch(), weights_of(learner.model), weights_of(learner.critic.module)
    scored, updates = learner.update(learner.score(batch))
    assert updates == []
    assert type(scored) is AdvantageBatch
    assert torch.equal(weights_of(learner.model), before)
    assert not torch.equal(weights_of(learner.critic.module), before_critic)
    assert (learner.scheduler.last_epoch, learner.num_optimizer_steps) == (2, 0)  # as skipped updates
    (group,) = learner.critic.optimization.optimizer.param_groups
    assert group["lr"] == pytest.approx(1e-3 * 0.9)  # the schedule's second update
    _, updates = learner.update(learner.score(dataclasses.replace(batch, step=2)))
    assert len(updates) == 2
    assert not torch.equal(weights_of(learner.model), before)


def test_the_critic_learns_without_advantages_but_from_no_response_without_a_grade(model):
    batch = episode_batch()
    learner = make_learner(model)
    scored = dataclasses.replace(learner.score(batch), advantages=torch.zeros(batch.response_mask.shape))
    before = weights_of(learner.critic.module)
    _, updates = learner.update(scored)
    assert updates == []
    assert not torch.equal(weights_of(learner.critic.module), before)

    alone, together = make_learner(model), make_learner(model)
    scored = moved_from(together.score(batch))
    wild = dataclasses.replace(scored, value_targets=torch.where(batch.graded[:, None], scored.value_targets, 1e6))
    together.critic.update(wild, torch.arange(len(batch)))
    alone.critic.update(scored, torch.arange(len(batch))[batch.graded])
    assert torch.equal(weights_of(alone.critic.module), weights_of(together.critic.module))
    nothing = dataclasses.replace(batch, rewards=torch.full((len(batch),), torch.nan))
    before = weights_of(alone.critic.module)
    alone.update(alone.score(nothing))
    assert torch.equal(weights_of(alone.critic.module), before)


def test_a_gradient_that_is_not_finite_is_not_applied_and_ends_the_run_in_the_end(model):
    learner = make_learner(model, max_nonfinite=2)
    scored = learner.score(episode_batch())
    broken = dataclasses.replace(scored, value_targets=torch.full_like(scored.value_targets, math.inf))
    before = weights_of(learner.critic.module)
    learner.critic.update(broken, torch.arange(12))
    assert learner.critic.updates[-1].nonfinite
    assert torch.equal(weights_of(learner.critic.module), before)
    with pytest.raises(RunError, match="the critic's gradient was not finite in 2 consecutive updates"):
        learner.critic.update(broken, torch.arange(12))
    with torch.no_grad():
        learner.critic.module.head.bias.fill_(math.inf)
    with pytest.raises(RunError, match="the critic's values are not finite for"):
        learner.score(episode_batch())


def test_frozen_parameters_stay_and_a_pattern_without_a_match_is_refused(model):
    learner = make_learner(model, critic={"frozen": ("attn", "embed")})
    names = dict(learner.critic.module.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in names.items()}
    learner.update(learner.score(episode_batch()))
    still = {name for name, parameter in names.items() if torch.equal(parameter, before[name])}
    assert still == {name for name in names if "attn" in name or "embed" in name}
    with pytest.raises(UserError, match=r"critic\.frozen: 'other' matches no parameter; a parameter is called 'model\.norm"):
        make_learner(model, critic={"frozen": ("other",)})


def test_the_value_head_starts_at_zero_and_learns_first(model):
    learner = make_learner(model, head=False)
    scored = learner.score(episode_batch())
    assert not scored.values.any()
    learner.critic.update(scored, torch.arange(12))
    assert learner.score(episode_batch()).values.any()


def test_an_adapter_trains_the_model_and_not_the_critic(model):
    learner = make_learner(model, lora={"rank": 2})
    values, _ = plain_values(model, episode_batch())
    torch.testing.assert_close(learner.score(episode_batch()).values.double(), values, rtol=1e-5, atol=1e-5)
    trained = {name for name, parameter in learner.critic.module.named_parameters() if parameter.requires_grad}
    assert not any("lora" in name for name in trained)
    assert len(trained) == len(list(learner.critic.module.parameters()))
    assert GAE().needs >= {"values"}
