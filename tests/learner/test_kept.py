"""Truncated sampling: the learner renormalizes over the tokens that the sampler kept, in value and gradient."""

import copy
import dataclasses
import json

import pytest
import torch
from pydantic import TypeAdapter

from rlzoo import load_zoo
from rlzoo.learner import log_probs as model_module
from rlzoo.learner.batch import ScoredBatch, collate
from rlzoo.learner.log_probs import ResponseLogProbs
from rlzoo.learner.micro_batches import padded
from rlzoo.rollout.draws import Truncation
from rlzoo.rollout.episodes import Player
from rlzoo.rollout.sampler import HFSampler
from rlzoo.rollout.types import Rollout, RolloutGroup
from rlzoo.tasks.environments import Host
from rlzoo.tasks.problem import Problem
from tests import oracle
from tests.learner.test_learner import make_learner, relative_error, step_gradient
from tests.off_policy import VOCABULARY, make_model
from tests.rollout.test_episodes import ENDS, WIDE
from tests.rollout.test_sampler import PROMPTS, tokenizer
from tests.rollout.test_truncation import sets_of
from tests.rules import few
from tests.tasks.environments.games import Words

TRUNCATION = Truncation(top_p=0.9, top_k=60)


@pytest.fixture(scope="module")
def model():
    return make_model().eval()


@pytest.fixture(scope="module", params=["single turn", "episodes"])
def groups(model, request):
    """Three prompts with six responses each, from a truncated distribution."""
    if request.param == "single turn":
        sampler = HFSampler(model, tokenizer("<pad>"), end_ids=frozenset({1}), max_new_tokens=20)
        rollouts = sampler.sample(PROMPTS, 6, seed=2, truncation=TRUNCATION)
    else:
        sampler = HFSampler(model, tokenizer("<pad>"), end_ids=ENDS, max_new_tokens=60)
        problems = [Problem(f"episode {number}", "") for number in range(3) for _ in range(6)]
        player = Player(sampler, Host(Words, workers=0, timeout=5.0), WIDE)
        rollouts = player.play(problems, [number // 6 for number in range(18)], seed=2, truncation=TRUNCATION)
    noise = torch.randn(18, generator=torch.Generator().manual_seed(0)).tolist()
    rollouts = [dataclasses.replace(rollout, reward=reward) for rollout, reward in zip(rollouts, noise, strict=True)]
    return [RolloutGroup(Problem("q", "a"), tuple(rollouts[start : start + 6])) for start in (0, 6, 12)]


def dense(model, groups, width):
    """Return float64 log-probs and entropies ``(B, T)`` with gradient, row by row, with one dense mask per token."""
    log_probs, entropies = [], []
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        sequence = torch.tensor(rollout.prompt_ids + rollout.response_ids)
        logits = model(input_ids=sequence[None]).logits[0, len(rollout.prompt_ids) - 1 : -1]
        rows = []
        for token, scores, ids in zip(rollout.response_ids, logits, sets_of(rollout), strict=True):
            probs = scores[sorted(ids)].softmax(-1)
            rows.append(torch.stack([probs[sorted(ids).index(token)].log(), -(probs * probs.log()).sum()]))
        rows = torch.nn.functional.pad(torch.stack(rows), (0, 0, 0, width - len(rows)))
        log_probs.append(rows[:, 0])
        entropies.append(rows[:, 1])
    return torch.stack(log_probs), torch.stack(entropies)


def test_the_old_log_probs_of_the_learner_equal_those_of_the_sampler(model, groups):
    learner = make_learner(model, load_zoo()["grpo"](), num_minibatches=1)
    batch = learner.score(collate(groups))
    old, entropy = learner.micro_batches.log_probs(learner.model, batch)
    torch.testing.assert_close(old, batch.rollout_log_probs, atol=1e-5, rtol=0)
    with torch.no_grad():
        expected = dense(copy.deepcopy(model).double(), groups, old.shape[1])
    for got, want in zip((old, entropy), expected, strict=True):
        torch.testing.assert_close(got.double(), torch.where(batch.response_mask, want, 0.0), atol=1e-5, rtol=0)
    updated, _ = learner.update(batch)
    torch.testing.assert_close(updated.old_log_probs, batch.rollout_log_probs, atol=1e-5, rtol=0)


def test_without_the_kept_sets_the_ratio_to_the_sampler_is_off(model, groups):
    batch = collate(groups)
    learner = make_learner(model, load_zoo()["grpo"]())
    mask = batch.response_mask
    with_sets = (learner.log_probs(batch) - batch.rollout_log_probs)[mask]
    without = (learner.log_probs(dataclasses.replace(batch, kept=None)) - batch.rollout_log_probs)[mask]
    assert float(with_sets.exp().sub(1).abs().max()) < 1e-5
    # the dropped probability lowers every ratio, by 10% or more on some tokens that top-k affects
    assert float(without.max()) < 1e-6
    assert float(without.exp().mean()) < 0.97


SETTINGS = [{}, {"max_tokens_per_micro_batch": 1}, {"max_tokens_per_micro_batch": 60}, {"padding_side": "left"}]
SETTINGS += [{"packing": True}, {"packing": True, "max_tokens_per_micro_batch": 60}]


@pytest.fixture(scope="module")
def expected(model, groups):
    """The batch with old log-probs off the current ones, and the float64 gradient of a step of GRPO."""
    policy = load_zoo()["grpo"]()
    learner = make_learner(model, policy)
    batch = learner.score(collate(groups))
    precise = copy.deepcopy(model).double()
    current, _ = dense(precise, groups, batch.response_mask.shape[1])
    noise = torch.randn(current.shape, generator=torch.Generator().manual_seed(0))
    old = torch.where(batch.response_mask, current.detach().float() - 0.3 * noise, 0.0)
    batch = ScoredBatch.of(batch, old_log_probs=old)
    mask = batch.response_mask.numpy()
    inputs = current.detach().numpy(), old.double().numpy(), batch.advantages.double().numpy(), mask
    result = oracle.grpo(*inputs)
    assert 0.1 < result.clipped[mask].mean() < 0.9
    (current * torch.from_numpy(oracle.gradient(result, mask, policy.reduction))).sum().backward()
    return batch, torch.cat([parameter.grad.flatten() for parameter in precise.parameters()])


@pytest.mark.parametrize("settings", few(SETTINGS, 4), ids=str)
def test_the_gradient_equals_the_float64_gradient_for_every_split(model, expected, settings):
    batch, gradient = expected
    got, _ = step_gradient(model, load_zoo()["grpo"](), batch, **settings)
    assert relative_error(got.double(), gradient) < 1e-5


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("chunk", few([7, 1, 10_000]))
def test_chunking_changes_neither_values_nor_gradients(monkeypatch, model, groups, chunk, chunked):
    monkeypatch.setattr(model_module, "LOGITS_PER_CHUNK", chunk * VOCABULARY)
    batch = collate(groups)
    module, precise = ResponseLogProbs(copy.deepcopy(model), entropy_gradient=True), copy.deepcopy(model).double()
    module.chunked = chunked
    log_probs, entropy = module(padded(batch, torch.arange(18), 0))
    wanted, wanted_entropy = (each[batch.response_mask] for each in dense(precise, groups, batch.response_mask.shape[1]))
    torch.testing.assert_close(log_probs.double(), wanted, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy.double(), wanted_entropy, atol=1e-5, rtol=0)
    weights = torch.linspace(-1, 1, len(log_probs), dtype=torch.float64)
    (log_probs * weights + entropy * weights.flip(0)).sum().backward()
    (wanted * weights + wanted_entropy * weights.flip(0)).sum().backward()
    got, want = (torch.cat([each.grad.flatten().double() for each in m.parameters()]) for m in (module, precise))
    assert relative_error(got, want) < 1e-5


def test_the_reference_is_renormalized_over_the_same_tokens(model, groups):
    learner = make_learner(model, load_zoo()["grpo"](), kl_coef=0.1)
    batch = learner.score(collate(groups))
    torch.testing.assert_close(batch.ref_log_probs, batch.rollout_log_probs, atol=1e-5, rtol=0)


def test_a_checkpoint_keeps_the_sets_of_responses_sampled_ahead(groups):
    rollouts, adapter = list(groups[0].rollouts), TypeAdapter(list[Rollout])
    text = adapter.dump_json(rollouts)
    assert adapter.validate_json(text) == rollouts
    assert json.loads(text)[0]["kept"]["ids"].isascii()
