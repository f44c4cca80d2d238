"""New weights arrive: after an update, and not before, vLLM reports the trainer's log-probs."""

import dataclasses
import itertools

import pytest
import torch

from rlzoo import load_zoo
from rlzoo.config.sections import LearnerConfig
from rlzoo.learner.batch import collate
from rlzoo.learner.learner import Learner
from rlzoo.rollout.types import RolloutGroup

# one token per character; longer than a block of vLLM's cache (128 tokens on the CPU), so that its start is cached
from rlzoo.tasks.problem import Problem

# one token per character; longer than a block of vLLM's cache (128 tokens on the CPU), so that its start is cached
LONG = "+".join("12345"[: 1 + place % 5] for place in range(60))[:190] + "="
PROMPTS = ["3+5+9=", LONG]
CLOSE, FAR = 1e-4, 1e-2


def test_perturbed_weights_reach_the_sampler(pair):
    assert pair.difference(pair.sampler.sample(PROMPTS, 4, seed=1)) < CLOSE
    pair.perturb()
    assert pair.difference(pair.sampler.sample(PROMPTS, 4, seed=1)) > FAR
    pair.sync()
    for temperature in (1.0, 0.7):
        rollouts = pair.sampler.sample(PROMPTS, 4, seed=1, temperature=temperature)
        assert pair.difference(rollouts, temperature) < CLOSE


def test_the_prompt_cache_is_cleared_on_a_weight_update(pair):
    assert len(pair.tokenizer(LONG)["input_ids"]) == 191
    pair.sync()
    pair.sampler.sample([LONG], 2, seed=1)
    pair.perturb()
    pair.sync()
    assert pair.difference(pair.sampler.sample([LONG], 2, seed=1)) < CLOSE


def test_every_tensor_affects_the_log_probs(pair):
    """Change one tensor at a time, so that none is masked by the others."""
    for name, tensor in pair.model.named_parameters():
        with torch.no_grad():
            tensor.add_(0.2 * torch.randn_like(tensor))
        before = pair.difference(pair.sampler.sample(PROMPTS, 2, seed=2))
        pair.sync()
        after = pair.difference(pair.sampler.sample(PROMPTS, 2, seed=2))
        assert after < CLOSE < before, name


def test_after_an_optimizer_step_sampler_and_trainer_agree(pair):
    pair.sync()
    learner = Learner(
        pair.model,
        load_zoo()["grpo"](),
        LearnerConfig(lr=1e-2, num_minibatches=2),
        pad_id=0,
        max_length=24,
        num_updates=2,
    )
    batch = batch_of(pair.sampler.sample(PROMPTS, 8, seed=4))
    assert largest_difference(learner, batch) < CLOSE
    _, updates = learner.update(learner.score(batch))
    assert not any(update.skipped for update in updates)
    assert largest_difference(learner, batch_of(pair.sampler.sample(PROMPTS, 8, seed=4))) > FAR
    pair.sync()
    assert largest_difference(learner, batch_of(pair.sampler.sample(PROMPTS, 8, seed=4))) < CLOSE


def batch_of(rollouts):
    """Grade responses alternately with 0 and 1, so that there is something to learn."""
    rewards = itertools.cycle((0.0, 1.0))
    graded = [dataclasses.replace(rollout, reward=reward) for rollout, reward in zip(rollouts, rewards, strict=False)]
    groups = [RolloutGroup(Problem("q", "a"), tuple(graded[:8])), RolloutGroup(Problem("q", "a"), tuple(graded[8:]))]
    return collate(groups)


def largest_difference(learner, batch):
    return float((learner.log_probs(batch) - batch.rollout_log_probs).abs().max())


def test_sampling_is_refused_before_the_first_weights(pair):
    pair.sampler.has_weights = False
    with pytest.raises(AssertionError, match="update_weights must be called before sampling"):
        pair.sampler.sample(PROMPTS, 1, seed=0)
    pair.sync()
