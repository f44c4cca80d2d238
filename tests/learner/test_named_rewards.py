"""Named rewards reach the estimator: advantages and gradients equal an independent computation over the graded responses."""

import dataclasses

import numpy as np
import pytest
import torch
from rlzoo_grpo import GRPO

from rlzoo.config.sections import RewardConfig
from rlzoo.rollout.types import Rollout, RolloutGroup
from rlzoo.tasks.problem import Problem
from tests import oracle
from tests.learner.test_learner import make_learner, relative_error, step_gradient
from tests.off_policy import make_model, off_policy_batch

WEIGHTS = {"short": 0.5, "polite": -2.0}
MISSING = torch.tensor([1, 2, 7])
RULE = GRPO(advantage="gdpo")


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def batch(model):
    """Three prompts with six responses each; three responses have no grade, and `polite` is equal in the last prompt."""
    made, rng = off_policy_batch(model, GRPO()), torch.Generator().manual_seed(4)
    right = torch.randint(0, 2, (len(made),), generator=rng).float()
    parts = {"right": right, "short": torch.rand(len(made), generator=rng), "polite": torch.rand(len(made), generator=rng)}
    parts["polite"][12:] = 0.1
    parts = {name: values.index_fill(0, MISSING, torch.nan) for name, values in parts.items()}
    rewards = sum(WEIGHTS.get(name, 1.0) * values for name, values in parts.items())
    return dataclasses.replace(made, rewards=rewards, reward_parts=parts)


def expected_advantages(batch):
    graded = batch.graded
    parts = {name: values[graded].double().numpy() for name, values in batch.reward_parts.items()}
    advantages = np.zeros((len(batch), 1))
    advantages[graded.numpy()] = oracle.gdpo(parts, WEIGHTS, batch.group_ids[graded].numpy())
    return torch.from_numpy(advantages).float()


def test_gdpo_compares_the_graded_responses_and_every_split_has_its_gradient(model, batch):
    learner = make_learner(model, RULE, reward=RewardConfig(weights=WEIGHTS))
    got, expected = learner.score(batch).advantages, expected_advantages(batch)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert not got[MISSING].any()
    plain, _ = step_gradient(model, RULE, dataclasses.replace(batch, advantages=expected))
    for settings in ({}, {"max_tokens_per_micro_batch": 40}, {"packing": True}, {"padding_side": "left"}):
        gradient, _ = step_gradient(model, RULE, dataclasses.replace(batch, advantages=got), **settings)
        assert relative_error(gradient, plain) < 1e-5, settings


def test_other_estimators_read_the_weighted_sum_alone(model, batch):
    without = dataclasses.replace(batch, reward_parts=None)
    for name in ("group_norm", "batch_norm"):
        learner = make_learner(model, GRPO(advantage=name), reward=RewardConfig(weights=WEIGHTS))
        assert torch.equal(learner.score(batch).advantages, learner.score(without).advantages)


def test_a_group_is_mixed_if_what_the_estimator_compares_differs():
    def graded(reward, **parts):
        return Rollout((5,), (6, 1), (0.0, 0.0), "", True, 0, reward, parts)

    rollouts = (graded(1.0, right=1.0, short=0.0), graded(1.0, right=0.0, short=1.0), graded(None))
    assert not RolloutGroup(Problem("", ""), rollouts).is_mixed
    assert RolloutGroup(Problem("", ""), rollouts, ("right",)).is_mixed
    assert not RolloutGroup(Problem("", ""), (rollouts[0], rollouts[0], graded(None)), ("right", "short")).is_mixed
