"""What a step does not compute: old log-probs from its own pass, and backward passes of rows without a gradient."""

import copy
import dataclasses
from typing import ClassVar

import numpy as np
import pytest
import torch

from rlzoo import ClipPolicy, load_zoo, ops
from rlzoo.config.sections import RewardConfig
from rlzoo.core.errors import PolicyError
from tests.estimates import correction
from tests.learner.test_learner import current_log_probs, make_learner, plain_gradient, relative_error, step_gradient
from tests.off_policy import make_model, off_policy_batch, take_step, take_updates
from tests.rules import few


@pytest.fixture(scope="module")
def model():
    return make_model()


def passes_of(learner):
    """Count the rows of each forward pass from now on, by whether a backward pass follows."""
    seen = {True: [], False: []}

    def hook(module, given):
        seen[torch.is_grad_enabled()].append(given[0].input_ids.shape[0])

    learner.model.register_forward_pre_hook(hook)
    return seen


def weights_of(learner):
    return torch.cat([parameter.detach().flatten() for parameter in learner.model.parameters()])


@pytest.mark.parametrize("name", ["grpo", "fspo", "m2po"])  # scopes token, sequence, batch
def test_the_first_update_provides_the_old_log_probs_of_its_rows(model, name):
    policy = load_zoo()[name]()
    batch = off_policy_batch(model, policy)
    plain = make_learner(model, policy, num_minibatches=3)
    order = torch.randperm(18, generator=torch.Generator().manual_seed(5)).chunk(3)
    known = dataclasses.replace(batch, old_log_probs=plain.log_probs(batch))
    updates = [take_step(plain, known, rows, 5 + index) for index, rows in enumerate(order)]

    learner = make_learner(model, policy, num_minibatches=3)
    got, got_updates = take_updates(learner, batch, seed=5)
    torch.testing.assert_close(got.old_log_probs, known.old_log_probs, atol=1e-5, rtol=0)
    assert torch.equal(got_updates[0].minibatch.log_probs, got.old_log_probs[order[0]])
    assert relative_error(weights_of(learner), weights_of(plain)) < 1e-6
    for one, other in zip(got_updates, updates, strict=True):
        assert torch.equal(one.minibatch.rows, other.minibatch.rows)
        assert one.minibatch.objective == pytest.approx(other.minibatch.objective, rel=1e-5, abs=1e-7)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)


def test_one_update_per_batch_takes_one_pass(model):
    policy = load_zoo()["grpo"]()
    batch = off_policy_batch(model, policy)
    learner = make_learner(model, policy, num_minibatches=1)
    seen = passes_of(learner)
    take_updates(learner, batch, seed=0)
    without = int((batch.advantages == 0).sum())
    assert (sum(seen[True]), sum(seen[False])) == (18 - without, without)


@pytest.mark.parametrize("cause", ["reward", "mismatch"])
def test_old_log_probs_are_computed_first_if_something_needs_them(model, cause):
    policy = load_zoo()["grpo"](advantage="batch_norm")
    batch = off_policy_batch(model, policy)
    learner = make_learner(model, policy, num_minibatches=1, reward=RewardConfig(kl_coef=0.01 if cause == "reward" else 0))
    if cause == "mismatch":
        learner.correction = correction("tis")
        batch = dataclasses.replace(batch, rollout_log_probs=batch.old_log_probs)
    seen = passes_of(learner)
    got, _ = take_updates(learner, batch, seed=0)
    assert sum(seen[False]) >= 18
    assert (got.old_log_probs[got.response_mask] != 0).all()


@pytest.mark.parametrize("name", ["grpo", "fspo", "m2po"])
def test_rows_without_an_advantage_get_no_backward_pass(model, name):
    policy = load_zoo()[name]()
    batch = off_policy_batch(model, policy)
    learner = make_learner(model, policy, max_tokens_per_micro_batch=100)
    seen = passes_of(learner)
    measures = learner.accumulate(batch, torch.arange(18))
    assert 0 < sum(seen[True]) <= 15  # 3 of 18 rows have none; a rule of scope "batch" also leaves out what it clips
    assert len(measures.table.length) == 18
    assert (measures.log_probs[batch.response_mask] != 0).all()


class Penalised(ClipPolicy):
    """Pushes every response down a little, regardless of its advantage."""

    name, paper, scope = "penalised", "none", "token"
    learns_without_advantages: ClassVar = True

    def __call__(self, inputs):
        return ops.clipped_surrogate(ops.log_ratio(inputs), inputs.advantages - 0.3, band=None)


class PenalisedAtOnce(Penalised):
    """The same for the whole step."""

    scope = "batch"


def test_a_rule_with_a_gradient_at_advantage_zero_keeps_it(model):
    batch = off_policy_batch(model, load_zoo()["grpo"]())
    # J = mean over responses of the mean over tokens of r (A - .3), so dJ/dlog_probs = r (A - .3) / (B L), in float64
    mask, lengths = batch.response_mask, batch.lengths[:, None]
    ratio = (current_log_probs(model, batch) - batch.old_log_probs.double()).exp()
    derivative = torch.where(mask, ratio * (batch.advantages.double() - 0.3) / (18 * lengths), 0.0)
    expected = plain_gradient(model, batch, derivative.numpy())
    for policy in (Penalised(), PenalisedAtOnce()):
        got, objective = step_gradient(model, policy, batch, max_tokens_per_micro_batch=60)
        assert relative_error(got.double(), expected) < 1e-5
        assert objective == pytest.approx(float(derivative.sum()), rel=1e-5)


def test_a_rule_that_does_not_declare_such_a_gradient_is_refused(model):
    silent = type("Silent", (Penalised,), {"learns_without_advantages": False, "__doc__": "", "__module__": __name__})
    learner = make_learner(model, silent())
    with pytest.raises(
        PolicyError, match="has a nonzero gradient for a response with advantage 0; if this is intended, set learns_without"
    ):
        learner.accumulate(off_policy_batch(model, load_zoo()["grpo"]()), torch.arange(18))


def test_a_kl_pulls_rows_without_an_advantage_too(model):
    policy = load_zoo()["grpo"]()
    batch = off_policy_batch(model, policy)
    learner = make_learner(model, policy, kl_coef=0.1)
    reference = torch.where(batch.response_mask, batch.old_log_probs, 0.0)
    seen = passes_of(learner)
    learner.accumulate(dataclasses.replace(batch, ref_log_probs=reference), torch.arange(18))
    assert (sum(seen[True]), sum(seen[False])) == (18, 0)


# dK/dlog_probs of each estimator, in k = log_probs - ref_log_probs and old = log_probs - old_log_probs
KL_SLOPES = {
    "k1": lambda k, old: torch.ones_like(k),
    "k2": lambda k, old: k,
    "k3": lambda k, old: 1 - (-k).exp(),
    "unbiased_k3": lambda k, old: old.exp() * k,
}


@pytest.mark.parametrize("estimator", few(KL_SLOPES, 2))
@pytest.mark.parametrize("name", ["grpo", "m2po"])  # judged per micro-batch, and all at once
def test_the_gradient_of_the_kl_equals_the_float64_gradient(model, name, estimator):
    policy = load_zoo()[name]()
    batch = off_policy_batch(model, policy)
    old = batch.old_log_probs.double()
    reference = torch.where(batch.response_mask, old + 0.3 * torch.sin(old), 0.0)
    batch = dataclasses.replace(batch, ref_log_probs=reference.float())
    without, _ = step_gradient(model, policy, batch)

    mask, lengths = batch.response_mask, batch.lengths[:, None].double()
    per_token = 1 / (18 * lengths) if policy.reduction == "sequence_mean" else 1 / lengths.sum()
    current = current_log_probs(model, batch)
    slope = KL_SLOPES[estimator](current - reference, current - old)
    kl = plain_gradient(model, batch, torch.where(mask, slope * per_token, 0.0).numpy())
    got, _ = step_gradient(model, policy, batch, kl_coef=0.5, kl_estimator=estimator, max_tokens_per_micro_batch=60)
    assert relative_error(got.double() - without.double(), -0.5 * kl) < 1e-4


@pytest.mark.parametrize("name", ["grpo", "fspo", "m2po"])
def test_the_gradient_of_the_entropy_bonus_equals_the_float64_gradient(model, name):
    policy = load_zoo()[name]()
    batch = off_policy_batch(model, policy)
    without, _ = step_gradient(model, policy, batch)
    got, _ = step_gradient(model, policy, batch, entropy_coef=2.0, max_tokens_per_micro_batch=60)

    mask, lengths = batch.response_mask, batch.lengths[:, None].double()
    per_token = 1 / (18 * lengths) if policy.reduction == "sequence_mean" else (1 / lengths.sum()).expand_as(lengths)
    exact = copy.deepcopy(model).double()
    for row, sequence in enumerate(batch.sequences):
        log_probs = exact(input_ids=sequence[None]).logits[0].log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)[int(batch.prompt_lengths[row]) - 1 : -1]
        (entropy[mask[row][: len(entropy)]].sum() * per_token[row]).sum().backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in exact.parameters()])
    assert relative_error(got.double() - without.double(), 2 * expected) < 1e-4


def test_rows_without_an_advantage_have_an_entropy_bonus(model):
    batch = off_policy_batch(model, load_zoo()["grpo"]())
    idle = dataclasses.replace(batch, advantages=torch.zeros_like(batch.advantages))
    learner = make_learner(model, load_zoo()["grpo"](), entropy_coef=0.1, num_minibatches=1)
    _, (update,) = take_updates(learner, idle)
    assert not update.skipped
    assert update.grad_norm > 0


@pytest.mark.parametrize("name", ["grpo", "m2po"])
def test_the_entropy_of_a_step_is_that_of_the_model(model, name):
    policy = load_zoo()[name]()
    batch = off_policy_batch(model, policy)
    batch.advantages[4] = 0.0  # forward pass only
    table = make_learner(model, policy).accumulate(batch, torch.arange(18)).table
    expected = []
    with torch.no_grad():
        for row, sequence in enumerate(batch.sequences):
            log_probs = model(input_ids=sequence[None]).logits[0].double().log_softmax(-1)
            start, mask = int(batch.prompt_lengths[row]) - 1, batch.response_mask[row]
            entropy = -(log_probs.exp() * log_probs).sum(-1)[start:-1]
            expected.append((int(mask.sum()), float(entropy[mask[: len(entropy)]].sum())))
    got = zip(table.length.tolist(), table.entropy_sum.tolist(), strict=True)  # in its own order
    assert np.array(sorted(got)) == pytest.approx(np.array(sorted(expected)), rel=1e-4)
