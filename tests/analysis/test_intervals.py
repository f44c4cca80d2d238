"""Intervals agree with scipy's own, hold the truth as often as they say, and the noise floor is what noise gives."""

import numpy as np
import pytest
from scipy import stats

from rlzoo.analysis.intervals import bootstrap_lre, bootstrap_mean, lre_noise, wilson


@pytest.mark.parametrize(("successes", "trials"), [(0, 10), (3, 10), (10, 10), (7, 1000)])
def test_wilson_is_scipys(successes, trials):
    expected = stats.binomtest(successes, trials).proportion_ci(method="wilson")
    low, high = wilson(np.array([successes]), np.array([trials]))
    assert (low[0], high[0]) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_wilson_without_trials_is_nan():
    low, high = wilson(np.array([0.0]), np.array([0.0]))
    assert np.isnan([low[0], high[0]]).all()


@pytest.mark.parametrize("number", [2, 7, 50])
def test_the_bootstrap_of_a_mean_is_scipys(number):
    rng = np.random.default_rng(number)
    sums, counts = rng.random(number), rng.integers(1, 5, number)
    expected = stats.bootstrap(
        (sums, counts),
        lambda sums, counts, axis: sums.sum(axis) / counts.sum(axis),
        paired=True, vectorized=True, n_resamples=2000, method="percentile", rng=np.random.default_rng(3),
    ).confidence_interval  # fmt: skip
    assert bootstrap_mean(sums, counts, seed=3) == pytest.approx((expected.low, expected.high), rel=1e-12)


def clipped_by_prompt(rng, fractions, num_prompts, group_size=8):
    """Responses of prompts that are clipped more or less than their length bin's fraction, by a factor of their own."""
    bins = rng.integers(0, 6, num_prompts)
    factor = rng.beta(3, 27, num_prompts) / 0.1  # mean 1
    chance = np.clip(np.array(fractions)[bins] * factor, 0, 1)
    clipped = rng.random((num_prompts, group_size)) < chance[:, None]
    return np.repeat(bins, group_size), clipped.ravel().astype(float), np.repeat(np.arange(num_prompts), group_size)


@pytest.mark.parametrize("fractions", [[0.05, 0.05, 0.08, 0.1, 0.12, 0.2], [0.3, 0.05, 0.05, 0.05, 0.05, 0.05]])
def test_the_bootstrap_holds_the_truth_as_often_as_it_says_where_it_is_above_the_noise(fractions):
    kept = 1 - np.array(fractions)
    truth = np.abs(kept / kept.mean() - 1).max()
    rng = np.random.default_rng(0)
    intervals = [bootstrap_lre(*clipped_by_prompt(rng, fractions, 400), seed)[0] for seed in range(100)]
    held = sum(low <= truth <= high for low, high in intervals)
    assert 85 <= held <= 100


def test_the_noise_floor_is_the_lre_of_a_clip_that_is_blind_to_length():
    # 600 responses in six bins, a tenth of each clipped: deviations of the acceptance have the standard deviation
    # sqrt(.1 x .9 / 100) = .03, relative to .9: .033; the largest of six absolute ones is 1.6 times that, about .054
    bins = np.arange(600) % 6
    rng = np.random.default_rng(1)
    clipped = (rng.random(600) < 0.1).astype(float)
    assert lre_noise(bins, clipped) == pytest.approx(0.054, rel=0.2)
    assert lre_noise(bins, np.zeros(600)) == 0
    assert lre_noise(bins, np.ones(600)) is None


def test_one_prompt_has_no_interval_and_neither_has_a_clip_of_everything():
    bins, clipped = np.array([0, 1, 2]), np.array([0.0, 1.0, 0.0])
    assert bootstrap_lre(bins, clipped, np.zeros(3)) is None
    assert bootstrap_lre(bins, np.ones(3), np.arange(3)) is None
