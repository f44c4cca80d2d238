"""The optimal token baseline on real log-probs: every advantage compared with one computed row by row from the full logits."""

import dataclasses
from collections import defaultdict

import pytest
import torch
from rlzoo_grpo import GRPO

from rlzoo import RunConfig, UserError
from rlzoo.config.sections import RewardConfig
from tests.learner.test_learner import make_learner
from tests.off_policy import make_model, off_policy_batch

OTB = GRPO(advantage="optimal_token_baseline")


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def batch(model):
    made = off_policy_batch(model, GRPO())
    return dataclasses.replace(made, rewards=torch.randn(len(made), generator=torch.Generator().manual_seed(4)))


def distributions(model, batch, row):
    """Return probabilities over the vocabulary at each generated token, float64 ``(L, V)``, and the tokens."""
    sequence, start = batch.sequences[row], int(batch.prompt_lengths[row])
    with torch.no_grad():
        probs = model(input_ids=sequence[None]).logits[0].double().softmax(-1)
    places = start + batch.response_mask[row].nonzero()[:, 0]
    return probs[places - 1], sequence[places]


def expected_advantages(model, batch, weights_of):
    """Return A_t = R - sum(R W_t) / sum(W_t) over the group's responses with a t-th token, token by token."""
    reached = defaultdict(list)
    for row in range(len(batch)):
        total = 0.0
        for t, (probs, token) in enumerate(zip(*distributions(model, batch, row), strict=True)):
            total += weights_of(probs, token)
            reached[int(batch.group_ids[row]), t].append((row, total))
    advantages = torch.zeros(batch.response_mask.shape, dtype=torch.float64)
    for (_, t), those in reached.items():
        whole = sum(weight for _, weight in those)
        baseline = sum(weight * float(batch.rewards[row]) for row, weight in those) / whole if len(those) > 1 else 0.0
        for row, _ in those:
            column = int(batch.response_mask[row].nonzero()[t, 0])
            advantages[row, column] = float(batch.rewards[row]) - baseline
    return advantages.float()


def squared_norm(probs, token):
    """Return the squared norm of the gradient of log p(token) with respect to the logits, by definition."""
    return float((torch.nn.functional.one_hot(token, len(probs)) - probs).square().sum())


@pytest.mark.parametrize("settings", [{}, {"max_tokens_per_micro_batch": 40}, {"padding_side": "left"}], ids=str)
def test_every_advantage_equals_that_from_the_whole_logits(model, batch, settings):
    got = make_learner(model, OTB, **settings).score(batch).advantages
    torch.testing.assert_close(got, expected_advantages(model, batch, squared_norm), rtol=1e-4, atol=1e-5)
    others = expected_advantages(model, batch, lambda probs, token: 1.0)
    assert (got - others).abs().max() > 0.01, "the weights matter on this data"


def test_entropies_and_old_log_probs_are_unchanged(model, batch):
    learner, plain = make_learner(model, OTB), make_learner(model, GRPO())
    start = learner.score(batch)
    torch.testing.assert_close(start.old_log_probs, plain.log_probs(batch))
    torch.testing.assert_close(
        learner.micro_batches.log_probs(learner.model, batch)[1], plain.micro_batches.log_probs(plain.model, batch)[1]
    )
    _, updates = learner.update(start)
    assert all(update.grad_norm > 0 for update in updates)


def test_kl_in_the_reward_is_charged_per_token(model, batch):
    learner = make_learner(model, OTB, reward=RewardConfig(kl_coef=0.1))
    with torch.no_grad():
        for weight in learner.language_model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    with_kl, without = learner.score(batch).advantages, make_learner(model, OTB).score(batch).advantages
    assert (with_kl - without).abs().max() > 0.01
    assert not with_kl[~batch.response_mask].any()


@pytest.mark.parametrize("clip", ["gspo", "fspo"])
def test_a_rule_of_whole_responses_is_refused_with_it(clip):
    with pytest.raises(UserError, match=f"its values differ between tokens, but {clip} accepts only one value per response"):
        RunConfig.compose(clip=clip, overrides=["clip.advantage=optimal_token_baseline"])
