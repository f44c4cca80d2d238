"""Shaped rewards: the length penalty, the filter on truncated responses, and the KL inside the reward."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from rlzoo_grpo import GRPO

from rlzoo import ClipInputs
from rlzoo.config.sections import RewardConfig
from rlzoo.learner.batch import ScoredBatch, collate
from rlzoo.learner.shaping import overlong_penalty
from rlzoo.rollout.types import Rollout, RolloutGroup
from rlzoo.tasks.problem import Problem
from rlzoo.training.metrics import reward_metrics
from tests import oracle
from tests.learner.test_learner import current_log_probs, make_learner, oracle_step, relative_error, step_gradient
from tests.off_policy import clip_fraction, make_model, off_policy_batch, reordered

LIMIT = 30  # the longest response of the off-policy rows
DAPO = GRPO(clip_high=0.28, reduction="token_mean")
REINFORCE_PP = GRPO(advantage="batch_norm", reduction="token_mean")


@pytest.fixture(scope="module")
def model():
    return make_model()


def graded(rows, seed=3):
    """Return rows of a batch as groups of six rollouts with rewards 0 and 1; those at the length limit are truncated."""
    rewards = torch.randint(0, 2, (len(rows),), generator=torch.Generator().manual_seed(seed)).tolist()
    rollouts = []
    for sequence, length, reward in zip(rows.sequences, rows.lengths.tolist(), rewards, strict=True):
        ids = tuple(sequence.tolist())
        finished = length < LIMIT
        rollouts.append(Rollout(ids[:-length], ids[-length:], (0.0,) * length, "", finished, 0, float(reward)))
    return [RolloutGroup(Problem("", ""), tuple(rollouts[start : start + 6])) for start in range(0, len(rollouts), 6)]


def off_policy(model, policy, settings):
    """Return graded rollouts shaped by the settings, with old log-probs for which 10 to 40% is clipped."""
    rows = off_policy_batch(model, policy, holes=False)
    return ScoredBatch.of(scored(graded(rows), policy.advantage, settings, LIMIT), old_log_probs=rows.old_log_probs)


def scored(groups, advantage, settings, limit):
    """Return groups with the advantages from a learner with these settings."""
    learner = make_learner(make_model(), GRPO(advantage=advantage), reward=settings.model_copy(update={"kl_coef": 0.0}))
    learner.max_length = limit
    return learner.score(collate(groups))


def clips(model, policy, batch):
    width = batch.response_mask.shape[1]
    current = current_log_probs(model, batch).float()[:, :width]
    inputs = ClipInputs(current, batch.old_log_probs, batch.advantages[:, :1], batch.response_mask)
    return 0.1 <= clip_fraction(policy, inputs) <= 0.4


def test_overlong_penalty_worked_by_hand():
    # a buffer of 20 of 100 tokens: no penalty up to 80, a quarter of it at 85, half at 90, all of it at 100
    lengths = torch.tensor([1, 80, 81, 85, 90, 100])
    settings = RewardConfig(overlong_buffer=0.2)
    assert overlong_penalty(lengths, 100, settings).tolist() == pytest.approx([0, 0, 0.05, 0.25, 0.5, 1.0])
    doubled = RewardConfig(overlong_buffer=0.2, overlong_penalty=2.0)
    assert overlong_penalty(lengths, 100, doubled).tolist() == pytest.approx([0, 0, 0.1, 0.5, 1.0, 2.0])
    assert overlong_penalty(lengths, 100, RewardConfig()).tolist() == [0.0] * 6
    whole = RewardConfig(overlong_buffer=1.0)
    assert overlong_penalty(lengths, 100, whole).tolist() == pytest.approx([0.01, 0.8, 0.81, 0.85, 0.9, 1.0])


def test_the_penalty_is_part_of_what_the_estimator_sees():
    # three right answers of 16, 18 and 20 tokens, buffer is the last 4 of 20: rewards 1, 1 - 1/2, 1 - 1; their mean is 1/2
    def right(length):
        return Rollout((1,), (2,) * length, (0.0,) * length, "", length < 20, 0, 1.0)

    groups = [RolloutGroup(Problem("", ""), (right(16), right(18), right(20)))]
    settings = RewardConfig(overlong_buffer=0.2)
    batch = scored(groups, "group_mean", settings, 20)
    assert batch.rewards.tolist() == [1.0, 0.5, 0.0]
    assert batch.advantages.tolist() == [[0.5], [0.0], [-0.5]]
    assert reward_metrics(batch, settings) == {"reward/shaped_mean": 0.5}
    assert reward_metrics(batch, RewardConfig()) == {}
    filtered = scored(groups, "group_mean", RewardConfig(overlong_buffer=0.2, overlong_filtering=True), 20)
    assert filtered.advantages.tolist() == [[0.5], [0.0], [0.0]]  # the mean still includes the third


@pytest.mark.parametrize("reduction", ["sequence_mean", "token_mean"])
def test_filtering_keeps_the_denominator(model, reduction):
    # row 0 was truncated; the others have the gradient that they would have with A = 0 in that row
    policy = GRPO(reduction=reduction)
    batch = off_policy(model, policy, RewardConfig(overlong_filtering=True))
    assert batch.finished.tolist() == [False] + [True] * 17
    assert batch.advantages[0] == 0
    plain = off_policy(model, policy, RewardConfig())
    assert plain.advantages[0] != 0
    assert torch.equal(batch.advantages[1:], plain.advantages[1:])
    filtered, _ = step_gradient(model, policy, batch)
    kept, _ = step_gradient(model, policy, reordered(batch, torch.arange(1, 18)))
    num_tokens = int(batch.lengths.sum())
    share = 17 / 18 if reduction == "sequence_mean" else (num_tokens - LIMIT) / num_tokens
    assert relative_error(filtered, kept * share) < 1e-5


@pytest.mark.parametrize("filtering", [False, True])
def test_dapo_objective_and_gradient_from_rewards_to_weights(model, filtering):
    settings = RewardConfig(overlong_buffer=0.4, overlong_penalty=1.0, overlong_filtering=filtering)
    batch = off_policy(model, DAPO, settings)
    assert clips(model, DAPO, batch)
    rollouts = [rollout for group in graded(batch) for rollout in group.rollouts]
    rewards = np.array([r.reward + oracle.overlong_penalty(len(r.response_ids), LIMIT, 0.4, 1.0) for r in rollouts])
    advantages = oracle.group_norm(rewards, np.arange(18) // 6)
    if filtering:
        advantages[[not rollout.finished for rollout in rollouts]] = 0.0
    np.testing.assert_allclose(batch.advantages.numpy(), advantages, rtol=1e-5, atol=1e-6)
    assert (rewards != [rollout.reward for rollout in rollouts]).any()
    value, expected = oracle_step(model, DAPO, batch, clip_high=0.28)
    for max_tokens in (1, 100, 100_000):
        gradient, objective = step_gradient(model, DAPO, batch, max_tokens_per_micro_batch=max_tokens)
        assert objective == pytest.approx(value, rel=1e-5)
        assert relative_error(gradient.double(), expected) < 1e-5


def moved(model, seed=7):
    """Change the model as if it had been trained."""
    model, rng = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=rng), alpha=0.02)
    return model


def learn(model, batch, settings, policy=REINFORCE_PP, **options):
    """Train on one rollout batch with a learner whose model has moved away from its reference."""
    learner = make_learner(model, policy, reward=settings, num_minibatches=1, **options)
    learner.model.language_model.load_state_dict(moved(model).state_dict())
    return learner.update(learner.score(batch))


@pytest.mark.parametrize("filtering", [False, True])
def test_kl_in_the_reward_equals_the_explicit_loops_from_the_weights(model, filtering):
    settings = RewardConfig(kl_coef=0.3, overlong_filtering=filtering)
    batch, (update,) = learn(model, off_policy(model, REINFORCE_PP, settings), settings)
    token_kl = (current_log_probs(moved(model), batch) - current_log_probs(model, batch)).numpy()
    mask = batch.response_mask.numpy()
    assert np.abs(token_kl[mask]).mean() > 0.05
    returns = oracle.kl_returns(batch.rewards.numpy(), token_kl, mask, 0.3)
    expected = oracle.token_norm(returns, mask)
    if filtering:
        expected[0] = 0.0
    np.testing.assert_allclose(batch.advantages.numpy(), expected, rtol=1e-4, atol=1e-4)
    assert reward_metrics(batch, settings)["reward/kl"] == pytest.approx(token_kl[mask].mean(), rel=1e-4, abs=1e-6)
    assert not update.skipped
    assert update.minibatch.table.kl_sum.abs().max() == 0  # the KL is in the reward, not in the loss


def test_raw_returns_subtract_the_remaining_kl(model):
    settings, policy = RewardConfig(kl_coef=0.3), GRPO(advantage="raw")
    batch, _ = learn(model, off_policy(model, policy, settings), settings, policy)
    token_kl = (batch.old_log_probs - batch.ref_log_probs).double().numpy()
    expected = oracle.kl_returns(batch.rewards.numpy(), token_kl, batch.response_mask.numpy(), 0.3)
    np.testing.assert_allclose(batch.advantages.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_reinforce_pp_gradient_equals_the_oracle_for_any_micro_batches(model):
    settings = RewardConfig(kl_coef=0.3)
    start = off_policy(model, REINFORCE_PP, settings)
    learned, _ = learn(model, start, settings)
    batch = dataclasses.replace(learned, old_log_probs=start.old_log_probs)  # off-policy, as after some updates
    assert clips(model, REINFORCE_PP, batch)
    value, expected = oracle_step(model, REINFORCE_PP, batch)
    for max_tokens in (1, 60, 100_000):
        options = {"reward": settings, "max_tokens_per_micro_batch": max_tokens}
        gradient, objective = step_gradient(model, REINFORCE_PP, batch, **options)
        assert objective == pytest.approx(value, rel=1e-5)
        assert relative_error(gradient.double(), expected) < 1e-5


def test_one_reference_serves_the_reward_and_the_loss(model):
    settings = RewardConfig(kl_coef=0.3)
    start = off_policy(model, REINFORCE_PP, settings)
    both, (update,) = learn(model, start, settings, kl_coef=0.5)
    alone, _ = learn(model, start, settings)
    assert torch.equal(both.advantages, alone.advantages)
    assert update.minibatch.table.kl_sum.sum() > 0
    assert make_learner(model, REINFORCE_PP).reference is None


def test_equal_rewards_at_the_start_do_not_change_the_weights(model):
    # the model is its own reference, so every k1 is 0 and all returns are equal
    settings = RewardConfig(kl_coef=0.3)
    start = off_policy(model, REINFORCE_PP, settings)
    start = dataclasses.replace(start, rewards=torch.ones_like(start.rewards))
    learner = make_learner(model, REINFORCE_PP, reward=settings, num_minibatches=2)
    _, updates = learner.update(learner.score(start))
    assert updates == []


def test_the_kl_in_the_reward_is_limited_to_20_nats_per_token():
    model = make_model()
    batch = off_policy_batch(model, GRPO())
    settings = RewardConfig(kl_coef=0.5)
    learner = make_learner(model, GRPO(advantage="batch_norm"), reward=settings)

    def ban(head, states, logits):
        return torch.full_like(logits, -torch.inf).index_fill(-1, torch.tensor([0]), 0.0)

    learner.reference.language_model.lm_head.register_forward_hook(ban)
    scored = learner.score(batch)
    assert scored.advantages.isfinite().all()
    assert reward_metrics(scored, settings)["reward/kl"] == 20.0
