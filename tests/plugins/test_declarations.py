"""A rule behaves as it declares."""

import dataclasses

import pytest
import torch

from rlzoo import ClipInputs, UserError, load_zoo
from rlzoo.config.run_config import RunConfig
from rlzoo.core.reductions import StepCounts
from rlzoo.learner.judge import judgement
from rlzoo.testing.data import filled

RULES = load_zoo()
# written out, so that a rule that loses its declaration fails here
LEARN_WITHOUT_ADVANTAGES = {"dro", "gvpo", "kl-cov", "opmd", "real"}
RATIO_TO_SAMPLER = {"cppo", "dppo-kl", "dppo-tv", "ipo", "sao"}
NAMES = sorted(RULES.keys() | LEARN_WITHOUT_ADVANTAGES | RATIO_TO_SAMPLER)
DENSE = {"kl-cov": {"fraction": 0.5}, "clip-cov": {"fraction": 0.5}}  # otherwise too few tokens of a small batch are selected


def off_policy_inputs():
    """Return twelve responses of 3 to 14 tokens with old log-probs 0.1 away; every third has no advantage."""
    rng = torch.Generator().manual_seed(3)
    mask = torch.arange(14) < torch.arange(3, 15)[:, None]
    log_probs = -torch.rand(mask.shape, generator=rng) * 2 - 0.1
    old = log_probs - 0.1 * torch.randn(mask.shape, generator=rng)
    advantages = torch.randn(12, 1, generator=rng)
    advantages[::3] = 0
    reported = old - 0.01 * torch.randn(mask.shape, generator=rng)
    return ClipInputs(log_probs, old, advantages, mask, reported)


def gradient(name, inputs):
    policy = RULES[name](**DENSE.get(name, {}))
    counts, inputs = StepCounts.of(inputs.response_mask), filled(policy, inputs)
    return judgement(policy, inputs, counts, 14).gradient


@pytest.mark.parametrize("name", NAMES)
def test_a_rule_declares_that_it_learns_without_advantages(name):
    inputs = off_policy_inputs()
    silent = inputs.advantages[:, 0] == 0
    assert bool((gradient(name, inputs)[silent] != 0).any()) == (name in LEARN_WITHOUT_ADVANTAGES)
    assert RULES[name].learns_without_advantages == (name in LEARN_WITHOUT_ADVANTAGES)
    assert RULES[name].learns_without_advantages == ("zero_advantage_zero_gradient" in RULES[name].exempt)


@pytest.mark.parametrize("name", NAMES)
def test_a_rule_declares_that_its_ratio_is_to_the_sampler(name):
    # log-probs of the sampler that are 0.001 lower make such a ratio 0.1% larger, too little for a bound on the mismatch
    inputs = off_policy_inputs()
    moved = dataclasses.replace(inputs, rollout_log_probs=inputs.rollout_log_probs - 1e-3)
    changed = not torch.equal(gradient(name, inputs), gradient(name, moved))
    assert changed == (name in RATIO_TO_SAMPLER)
    assert RULES[name].ratio_to_sampler == (name in RATIO_TO_SAMPLER)


@pytest.mark.parametrize("name", sorted(RATIO_TO_SAMPLER))
def test_a_ratio_to_the_sampler_is_not_corrected_twice(name):
    with pytest.raises(UserError, match=rf"correction='tis': the ratio of {name} is already relative to the sampler"):
        RunConfig.compose(clip=name, overrides=["correction=tis"])
    assert RunConfig.compose(clip=name).correction is None
    assert RunConfig.compose(clip="opsm", overrides=["correction=tis"]).correction.name == "tis"
