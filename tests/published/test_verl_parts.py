"""rlzoo's advantage estimators and corrections compared with verl 0.9.1's, on shared tensors."""

import dataclasses

import pytest
import torch
from verl.trainer.ppo.core_algos import compute_gae_advantage_return, get_adv_estimator_fn
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights, compute_rollout_rejection_mask
from verl.utils.torch_functional import masked_whiten

from rlzoo import AdvantageInputs, CorrectionInputs, load_zoo

ZOO = load_zoo()
GROUP = 6


def graded(seed, *, holes=True, with_token_rewards=False):
    """Return four groups of six ragged responses, some with two turns, one group with equal rewards."""
    rng = torch.Generator().manual_seed(seed)
    number, size = 4 * GROUP, 20
    lengths = torch.randint(3, size, (number, 1), generator=rng)
    lengths[::GROUP] = size
    mask = torch.arange(size) < lengths
    if holes:
        mask[::3, 1:3] = False
    rewards = torch.randn(number, 1, generator=rng)
    rewards[:GROUP] = 0.5
    paid = torch.where(mask, torch.randn(mask.shape, generator=rng), 0.0) if with_token_rewards else None
    return AdvantageInputs(rewards, torch.arange(number)[:, None] // GROUP, mask, token_rewards=paid)


def token_rewards(inputs):
    """verl takes all rewards per token; the reward of a response is on its last token."""
    mask = inputs.response_mask
    last = torch.where(mask, torch.arange(mask.shape[1]), -1).amax(-1, keepdim=True)
    paid = torch.zeros(mask.shape, dtype=torch.float64) if inputs.token_rewards is None else inputs.token_rewards.double()
    return paid.scatter_add(1, last, inputs.rewards.double())


def verl_advantages(name, inputs, **settings):
    index = inputs.group_ids[:, 0].numpy()  # its groups are keys of a dict
    return get_adv_estimator_fn(name)(token_rewards(inputs), inputs.response_mask, index=index, **settings)[0]


ESTIMATORS = [
    ("group_norm", "grpo", {"epsilon": 1e-6}),
    ("group_mean", "grpo", {"norm_adv_by_std_in_grpo": False}),
    ("leave_one_out", "rloo", {}),
]


@pytest.mark.parametrize(("ours", "name", "settings"), ESTIMATORS)
def test_advantages_equal_verl(ours, name, settings):
    for seed in range(4):
        inputs = graded(seed)
        expected = verl_advantages(name, inputs, **settings).float()
        got = torch.where(inputs.response_mask, ZOO.advantages[ours]()(inputs), 0.0)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_gdpo_equals_verl_apart_from_the_unit_of_the_last_step():
    # verl whitens over tokens, so that long responses count more; TRL and rlzoo normalise over responses
    for seed in range(4):
        inputs, rng = graded(seed, holes=False), torch.Generator().manual_seed(seed)
        mask, number = inputs.response_mask, len(inputs.rewards)
        parts = {"right": torch.randint(0, 2, (number, 1), generator=rng), "short": torch.rand(number, 1, generator=rng)}
        named = dataclasses.replace(inputs, reward_parts={key: value.float() for key, value in parts.items()})
        ours = ZOO.advantages["gdpo"]()(dataclasses.replace(named, reward_weights={"short": 0.5}))
        ones = torch.ones(number, 1, dtype=torch.long)
        theirs = get_adv_estimator_fn("gdpo")(
            torch.zeros(mask.shape),
            mask,
            index=inputs.group_ids[:, 0].numpy(),
            config={"gdpo_reward_keys": ["right", "short"], "gdpo_reward_weights": [1.0, 0.5]},
            non_tensor_batch={key: value[:, 0].numpy() for key, value in parts.items()},
            batch={"prompts": ones, "attention_mask": torch.cat([ones, mask.long()], 1)},
        )[0]
        whitened = masked_whiten(ours.expand(mask.shape), mask) * mask
        torch.testing.assert_close(whitened, theirs, rtol=1e-4, atol=1e-4)


def sampled(seed, spread):
    rng = torch.Generator().manual_seed(seed)
    mask = torch.arange(20) < torch.randint(1, 21, (24, 1), generator=rng)
    mask[::3, 2] = False
    mask[:, 0] = True
    old = -torch.rand(24, 20, generator=rng) - 0.5
    return CorrectionInputs(old, old - spread * torch.randn(24, 20, generator=rng), mask, torch.randn(24, 1, generator=rng))


WEIGHTS = [
    ({"name": "tis"}, "token", 2.0, 0.5),
    ({"name": "tis", "pool": "sum", "high": 1.5}, "sequence", 1.5, 0.3),
    ({"name": "icepop"}, "token", "0.5_2.0", 0.5),
    ({"name": "icepop", "pool": "sum", "low": 0.8, "high": 1.25}, "sequence", "0.8_1.25", 0.1),
]


@pytest.mark.parametrize(("settings", "level", "threshold", "spread"), WEIGHTS, ids=str)
def test_weights_equal_verl(settings, level, threshold, spread):
    correction = ZOO.corrections.build("correction", settings)
    for seed in range(4):
        inputs = sampled(seed, spread)
        mask = inputs.response_mask
        log_ratio = (inputs.old_log_probs - inputs.rollout_log_probs).double()
        expected, _ = compute_rollout_correction_weights(log_ratio, mask, level, threshold)
        weights = correction(inputs)
        torch.testing.assert_close(torch.where(mask, weights, 0.0), expected.float(), rtol=1e-5, atol=1e-6)
        tokens = weights.expand(mask.shape)[mask]
        assert 0.05 < (tokens < inputs.log_ratio.exp()[mask] - 1e-4).float().mean() < 0.9, "some are cut"


REJECTIONS = [
    ({"name": "trm", "max_divergence": 0.1, "mean_divergence": None}, "seq_max_k2", "0.1", 0.2),
    ({"name": "trm", "max_divergence": None, "mean_divergence": 0.02}, "seq_mean_k3", "0.02", 0.2),
    ({"name": "trm", "max_divergence": 0.15, "mean_divergence": 0.02}, "seq_max_k2,seq_mean_k3", "0.15,0.02", 0.2),
]


@pytest.mark.parametrize(("settings", "options", "thresholds", "spread"), REJECTIONS, ids=str)
def test_dropped_responses_equal_verl(settings, options, thresholds, spread):
    correction = ZOO.corrections.build("correction", settings)
    for seed in range(4):
        inputs = sampled(seed, spread)
        mask = inputs.response_mask
        log_ratio = (inputs.old_log_probs - inputs.rollout_log_probs).double()
        kept, _ = compute_rollout_rejection_mask(log_ratio, mask, options, thresholds)
        weights = correction(inputs)
        assert torch.equal(kept.bool(), mask & (weights > 0))
        assert 0.1 < weights.mean() < 0.9, "some are dropped"


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.7)])
@pytest.mark.parametrize("holes", [False, True])
def test_gae_and_its_value_targets_equal_verl(gamma, lam, holes):
    for seed in range(4):
        inputs = with_values(graded(seed, holes=holes, with_token_rewards=seed % 2 == 1))
        mask, ours = inputs.response_mask, ZOO.advantages["gae"](gamma=gamma, lam=lam)
        theirs = compute_gae_advantage_return(token_rewards(inputs), inputs.values, mask.double(), gamma, lam)
        for got, expected in zip((ours(inputs), ours.value_targets(inputs)), theirs, strict=True):
            # verl divides by the square root of the variance + 1e-8, rlzoo by the standard deviation + 1e-6
            torch.testing.assert_close(got, torch.where(mask, expected, 0.0).float(), rtol=1e-5, atol=1e-5)


def with_values(inputs):
    mask = inputs.response_mask
    rng = torch.Generator().manual_seed(7)
    values = torch.where(mask, torch.randn(mask.shape, generator=rng, dtype=torch.float64), 0.0)
    turn_ids = torch.where(mask, 0, -1)
    return dataclasses.replace(
        inputs, turn_ids=turn_ids, values=values, last_values=values[:, :1], finished=torch.ones(len(mask), 1, dtype=torch.bool)
    )
