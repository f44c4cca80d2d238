"""bfloat16 weights with float32 copies for the optimizer: small steps accumulate, and a run resumes exactly."""

import copy
import logging

import pytest
import torch
from rlzoo_grpo import GRPO
from safetensors.torch import load_file
from torch import nn

from rlzoo.config.sections import LaunchConfig, LearnerConfig
from rlzoo.learner.optimization import make_optimization
from rlzoo.models.processes import make_accelerator
from tests.learner.test_learner import make_learner
from tests.off_policy import make_model, off_policy_batch, take_updates

CHANGES = torch.tensor([1.0, -0.5, 0.25, -2.0])  # gradients that bfloat16 represents exactly


def trained_weights(dtype, steps, **settings):
    """Return a matrix of weights from 0.05 to 0.1, changed by 1e-6 in every step."""
    torch.manual_seed(0)
    start = (0.05 + 0.05 * torch.rand(64, 4)).bfloat16()
    module = nn.Linear(4, 64, bias=False).to(dtype)
    with torch.no_grad():
        module.weight.copy_(start)
    config = LearnerConfig(lr=1e-6, max_grad_norm=None, **settings)
    optimization = make_optimization(make_accelerator(LaunchConfig(), config), module, config)
    for _ in range(steps):
        with optimization.micro_batch(is_last=True):
            optimization.backward((module.weight.float() * CHANGES).sum())
        assert optimization.apply(None)[1]
    return start, module.weight.detach()


@pytest.mark.long
def test_small_updates_of_bfloat16_weights_are_not_lost():
    start, expected = trained_weights(torch.float32, 600)  # 6e-4, while neighbouring bfloat16 numbers are 2e-4 to 5e-4 apart
    _, kept = trained_weights(torch.bfloat16, 600)
    _, lost = trained_weights(torch.bfloat16, 600, master_weights=False)
    assert torch.equal(kept, expected.bfloat16())
    assert float((kept != start).float().mean()) > 0.9
    assert torch.equal(lost, start)


def test_gradients_of_micro_batches_add_up_in_float32():
    config = LearnerConfig(lr=1e-3)
    module = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    optimization = make_optimization(make_accelerator(LaunchConfig(), config), module, config)
    for value in [1.0, *[2.0**-9] * 512]:  # each of the small ones is lost next to 1 in bfloat16
        with optimization.micro_batch(is_last=value == 1.0):
            optimization.backward((module.weight.float() * value).sum())
    assert optimization.apply(None)[0] == 2.0


@pytest.fixture(scope="module")
def model():
    return make_model().bfloat16()


@pytest.mark.long
def test_a_learner_of_bfloat16_weights_follows_that_of_float32_weights(model):
    batch = off_policy_batch(copy.deepcopy(model).float(), GRPO())
    ends = {}
    for name, start in (("bfloat16", model), ("float32", copy.deepcopy(model).float())):
        learner = make_learner(start, GRPO(), lr=1e-3, num_minibatches=3, num_updates=20)
        for seed in range(6):
            take_updates(learner, batch, seed=seed)
        ends[name] = torch.cat([weight.flatten().float() for _, weight in learner.weights()])
    start = torch.cat([parameter.detach().flatten().float() for parameter in model.parameters()])
    moved, expected = ends["bfloat16"] - start, ends["float32"] - start
    assert float(torch.nn.functional.cosine_similarity(moved, expected, dim=0)) > 0.8


def test_masters_are_saved_and_resumed_exactly(model, tmp_path):
    batch = off_policy_batch(copy.deepcopy(model).float(), GRPO())
    learner = make_learner(model, GRPO(), lr=1e-5, num_minibatches=3, num_updates=20)
    take_updates(learner, batch, seed=0)
    learner.save(tmp_path)
    saved = load_file(tmp_path / "optimizer.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    again = make_learner(model, GRPO(), lr=1e-5, num_minibatches=3, num_updates=20)
    again.load(tmp_path, learner.num_optimizer_steps, learner.scheduler.last_epoch)
    for other in (learner, again):
        take_updates(other, batch, seed=1)
        other.save(tmp_path / str(id(other)))
    first, second = (load_file(tmp_path / str(id(other)) / "optimizer.safetensors") for other in (learner, again))
    assert all(torch.equal(first[name], second[name]) for name in first)
    ours, theirs = dict(learner.weights()), dict(again.weights())
    assert all(weight.dtype == torch.bfloat16 and torch.equal(weight, theirs[name]) for name, weight in ours.items())


def test_weights_that_lose_small_updates_are_warned_of_when_a_run_starts(model, caplog):
    with caplog.at_level(logging.WARNING, logger="rlzoo"):
        make_learner(model, GRPO())
        make_learner(copy.deepcopy(model).float(), GRPO(), master_weights=False)
    assert not caplog.text
    with caplog.at_level(logging.WARNING, logger="rlzoo"):
        make_learner(model, GRPO(), master_weights=False)
    assert "bfloat16 weights have no float32 copies: updates below 0.4% of a weight are lost to rounding" in caplog.text
