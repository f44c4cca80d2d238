"""How far responses moved, by length: hand-worked numbers, and the exponent of tokens that move independently or together."""

import math

import pytest
import torch

from rlzoo.core.types import ClipInputs
from rlzoo.measure.drift import Drift


def updates(lengths, token_log_ratios, advantages, sampled=None):
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    old = torch.where(mask, -1.0, 0.0)
    return ClipInputs(old + torch.where(mask, token_log_ratios, 0.0), old, advantages, mask, rollout_log_probs=sampled)


def test_the_numbers_of_two_lengths_are_those_worked_by_hand():
    """Tokens of responses of 1 and 4 move by +-.1 each: S is +-.1 and +-.4."""
    lengths = [1] * 12 + [4] * 12
    sign = torch.tensor([1.0, -1.0] * 12)[:, None]
    advantages = torch.tensor([1.0] * 6 + [-1.0] * 18)[:, None]
    inputs = updates(lengths, 0.1 * sign.expand(24, 4), advantages)
    drift = Drift.of([inputs, updates([3], torch.full((1, 3), 9.0), torch.zeros(1, 1))])  # the last has an advantage of 0
    short, long = drift.count.index(12), len(drift.count) - 1 - drift.count[::-1].index(12)
    assert sum(drift.count) == 24
    assert drift.moved == 1.0
    assert [drift.negative[k] for k in (short, long)] == [0.5, 1.0]
    assert [drift.sigma[k] for k in (short, long)] == pytest.approx([0.1 * (12 / 11) ** 0.5, 0.4 * (12 / 11) ** 0.5])
    assert [drift.sigma_root[k] for k in (short, long)] == pytest.approx([0.1 * (12 / 11) ** 0.5, 0.2 * (12 / 11) ** 0.5])
    assert [drift.sigma_mean[k] for k in (short, long)] == pytest.approx([0.1 * (12 / 11) ** 0.5] * 2)
    assert drift.exponent == pytest.approx(1.0, abs=1e-6)
    assert all(math.isnan(value) for value in drift.mismatch)


@pytest.mark.parametrize(("together", "exponent"), [(False, 0.5), (True, 1.0)])
def test_the_exponent_distinguishes_common_from_independent_drift(together, exponent):
    rng = torch.Generator().manual_seed(0)
    lengths = [400, *torch.randint(4, 400, (3999,), generator=rng).tolist()]
    noise = torch.randn(4000, 1 if together else 400, generator=rng).expand(4000, 400)
    drift = Drift.of([updates(lengths, 0.01 * noise, torch.ones(4000, 1))])
    assert drift.exponent == pytest.approx(exponent, abs=0.06)  # bins are wide


def test_responses_that_no_optimizer_step_preceded_are_left_out():
    lengths, ones = [2, 3, 4, 5], torch.ones(4, 1)
    still = updates(lengths, torch.zeros(4, 5), ones)
    assert Drift.of([still]) is None
    drift = Drift.of([still, updates(lengths, torch.full((4, 5), 0.1), ones)])
    assert (drift.moved, sum(drift.count)) == (0.5, 4)


def test_the_mismatch_is_that_of_the_old_model_to_the_sampler():
    lengths = [4] * 4
    sampled = torch.full((4, 4), -1.0) + torch.tensor([[0.1], [-0.1], [0.1], [-0.1]])
    drift = Drift.of([updates(lengths, torch.full((4, 4), 0.1), torch.ones(4, 1), sampled)])
    assert [value for value in drift.mismatch if not math.isnan(value)] == [pytest.approx(0.4 * (4 / 3) ** 0.5)]
