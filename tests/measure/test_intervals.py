"""Intervals with prompts as observations have the stated coverage, and the noise floor equals the effect of noise."""

import functools
import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from rlzoo.core.fairness import LengthWeights
from rlzoo.measure.intervals import CAUSES, Clusters, Proportions, mean_interval

SHARES = {
    "every length alike": [0.1] * 6,
    "a little uneven": [0.07, 0.08, 0.1, 0.1, 0.12, 0.14],
    "rising": [0.05, 0.05, 0.08, 0.1, 0.12, 0.2],
    "short ones cut": [0.3, 0.05, 0.05, 0.05, 0.05, 0.05],
}


def wilson(successes, trials):
    """Return Wilson's interval, for rows that are wrongly taken to be independent."""
    trials = np.where(trials > 0, trials, np.nan)
    z, share = stats.norm.ppf(0.975), successes / trials
    middle = (share + z**2 / (2 * trials)) / (1 + z**2 / trials)
    half = z / (1 + z**2 / trials) * np.sqrt(share * (1 - share) / trials + z**2 / (4 * trials**2))
    return middle - half, middle + half


def drawn(rng, fractions, num_prompts, epochs, group_size=8):
    """Draw bins, decisions and prompts. Responses to a prompt are similar in length and in how often they are clipped, and so
    are a response's epochs."""
    place = rng.random((num_prompts, 1)) * 6 + rng.normal(0, 0.6, (num_prompts, group_size))
    bins = np.clip(place, 0, 5.999).astype(int)
    factor = rng.beta(0.5, 4.5, (num_prompts, 1)) / 0.1  # mean 1, a correlation of 1/6 within a prompt
    chance = np.clip(np.array(fractions)[bins] * factor, 1e-4, 0.95)
    chance = chance if epochs == 1 else rng.beta(1.5 * chance, 1.5 * (1 - chance))
    clipped = rng.random((num_prompts, group_size, epochs)) < chance[..., None]
    rows = [np.broadcast_to(values, clipped.shape) for values in (bins[..., None], np.arange(num_prompts)[:, None, None])]
    return rows[0].ravel(), clipped.ravel().astype(float), rows[1].ravel()


def errors_of(weight, share):
    """Return ``lre_max`` and ``lre_mean``."""
    error = (weight - 1).abs()
    return float(error.max()), float((share * error).sum())


@functools.cache
def truth_of(name, epochs):
    bins, clipped, _ = drawn(np.random.default_rng(99), SHARES[name], 40_000, epochs)
    count, total = np.bincount(bins), np.bincount(bins, weights=clipped)
    weights = LengthWeights.of(torch.tensor(count)[:, None], torch.tensor(total)[:, None])
    return total / count, errors_of(weights.total, weights.share)


@pytest.mark.long
@pytest.mark.parametrize("epochs", [1, 4])
@pytest.mark.parametrize("num_prompts", [24, 240])
def test_intervals_by_length_have_coverage_with_shared_prompts_and_epochs(num_prompts, epochs):
    rng, held, independent = np.random.default_rng(0), [], []
    for name, fractions in SHARES.items():
        share, _ = truth_of(name, epochs)
        for _ in range(100):
            found = Clusters.of(*drawn(rng, fractions, num_prompts, epochs))
            filled = found.count.sum((0, 2)) > 0
            low, high = found.proportions()
            held.append(((low <= share) & (share <= high))[filled].mean())
            low, high = wilson(found.clipped.sum((0, 2)), found.count.sum((0, 2)))
            independent.append(((low <= share) & (share <= high))[filled].mean())
    assert np.mean(held) >= 0.935
    assert np.mean(independent) < (0.93 if epochs == 1 else 0.7)  # coverage if each row counted as an independent draw


def test_rows_that_are_independent_have_nearly_the_exact_binomial_interval():
    rng = np.random.default_rng(0)
    bins, clipped = np.repeat(np.arange(6), 500), (rng.random(3000) < 0.1).astype(float)
    found = Clusters.of(bins, clipped, np.arange(3000))
    for number, low, high in zip(found.clipped.sum((0, 2)), *found.proportions(), strict=True):
        expected = stats.binomtest(int(number), 500).proportion_ci(method="exact")
        assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("epochs", [1, 4])
def test_the_interval_of_lre_covers_the_true_value_and_both_estimates(epochs):
    rng, held = np.random.default_rng(1), []
    for name, num_prompts in itertools.product(SHARES, [24, 240]):
        _, truth = truth_of(name, epochs)
        for _ in range(30):
            errors = Clusters.of(*drawn(rng, SHARES[name], num_prompts, epochs)).reweighting()
            for error, found in zip(truth, (errors.total.max, errors.total.mean), strict=True):
                low, high = found.interval
                assert low <= found.corrected <= found.value <= high
                held.append(low <= error <= high)
    assert np.mean(held) >= 0.93


def measured(name, num_prompts):
    """Return ``lre_max`` of runs with four epochs: as measured, corrected, and the mean of its noise floor."""
    rng, num_runs = np.random.default_rng(2), 200 if num_prompts < 100 else 80
    found = [Clusters.of(*drawn(rng, SHARES[name], num_prompts, 4)).reweighting().total.max for _ in range(num_runs)]
    values, corrected, noise = np.array([(error.value, error.corrected, error.noise) for error in found]).T
    return values, corrected, noise.mean()


BIASED = {("a little uneven", 24), ("a little uneven", 480), ("rising", 24)}
"""Cases in which the measured error is too large. In the others one bin leads by more than the noise, so that noise raises the
error as often as it lowers it; the correction must not change these."""


@pytest.mark.long
@pytest.mark.parametrize("num_prompts", [24, 480])
@pytest.mark.parametrize("name", ["rising", "short ones cut", "a little uneven"])
def test_the_corrected_lre_has_almost_no_bias(name, num_prompts):
    _, (truth, _) = truth_of(name, 4)
    values, corrected, noise = measured(name, num_prompts)
    assert abs(corrected.mean() - truth) < 0.25 * noise
    assert (abs(values.mean() - truth) > 0.25 * noise) == ((name, num_prompts) in BIASED)


@pytest.mark.long
@pytest.mark.parametrize("num_prompts", [24, 480])
def test_the_corrected_lre_is_0_half_of_the_time_under_equal_clipping(num_prompts):
    # the true error is 0 and no estimate is below it; one with the right median is 0 half of the time, with a mean above 0
    values, corrected, noise = measured("every length alike", num_prompts)
    assert np.mean(corrected == 0) == pytest.approx(0.5, abs=0.1)
    assert corrected.mean() < 0.6 * noise
    assert values.mean() > 0.9 * noise


@pytest.mark.long
@pytest.mark.parametrize("epochs", [1, 4])
@pytest.mark.parametrize("num_prompts", [24, 240])
def test_the_noise_floor_is_the_lre_of_prompts_under_equal_clipping(num_prompts, epochs):
    rng = np.random.default_rng(3)
    found = [Clusters.of(*drawn(rng, [0.1] * 6, num_prompts, epochs)).reweighting().total.max for _ in range(150)]
    # the standard error of the mean of 150 such values is about 3%
    assert np.mean([error.noise for error in found]) == pytest.approx(np.mean([error.value for error in found]), rel=0.08)


def test_the_noise_floor_of_independent_rows_is_that_of_six_normals():
    # 600 responses in six bins, a tenth of each clipped: deviations of the acceptance have the standard deviation
    # sqrt(.1 x .9 / 100) = .03, relative to .9: .033; the largest of six absolute ones is 1.6 times that, about .054
    rows = np.arange(600)
    clipped = (np.random.default_rng(1).random(600) < 0.1).astype(float)
    assert Clusters.of(rows % 6, clipped, rows).reweighting().total.max.noise == pytest.approx(0.054, rel=0.2)
    assert Clusters.of(rows % 6, np.ones(600), rows).reweighting() is None


def test_nothing_clipped_bounds_the_length_error_by_what_could_have_been_missed():
    # Each bin has 100 rows of different prompts, without a clip. At most, one bin was clipped at the upper end of Jeffreys'
    # interval for 0 of 100, and the five others not at all: c_k - c = 5/6 c_k.
    rows = np.arange(600)
    nothing = Clusters.of(rows % 6, np.zeros(600), rows).reweighting().total.max
    end = stats.beta.ppf(0.975, 0.5, 100.5)
    assert (nothing.value, nothing.corrected, nothing.noise) == (0, 0, 0)
    assert nothing.interval == pytest.approx((0, 5 / 6 * end), rel=1e-6)
    assert end == pytest.approx(0.025, abs=0.001)


RISK = np.array([[3.0, 0.5], [3.0, 0.5], [2.9, 0.5], [2.9, 0.4], [2.8, 0.4], [2.8, 0.4]])
"""How often responses with A < 0 and A > 0 are clipped by length, relative to a fraction for all."""


def drawn_by_sign(rng, num_prompts, epochs, risk):
    """Draw like `drawn`; the share of A < 0 rises from .2 to .5 with the bin, and A < 0 is clipped more often."""
    group_size = 8
    place = rng.random((num_prompts, 1)) * 6 + rng.normal(0, 0.6, (num_prompts, group_size))
    bins = np.clip(place, 0, 5.999).astype(int)
    positive = rng.random(bins.shape) > 0.2 + 0.06 * bins
    factor = rng.beta(0.5, 4.5, (num_prompts, 1))
    chance = np.clip(risk[bins, positive.astype(int)] * factor, 1e-4, 0.95)
    chance = chance if epochs == 1 else rng.beta(1.5 * chance, 1.5 * (1 - chance))
    clipped = rng.random((num_prompts, group_size, epochs)) < chance[..., None]
    columns = (bins[..., None], np.arange(num_prompts)[:, None, None], positive[..., None])
    rows = [np.broadcast_to(values, clipped.shape).ravel() for values in columns]
    return rows[0], clipped.ravel().astype(float), rows[1], rows[2]


@functools.cache
def parts_of(epochs):
    found = Clusters.of(*drawn_by_sign(np.random.default_rng(98), 60_000, epochs, RISK))
    weights = LengthWeights.of(*(torch.tensor(values.sum(0)) for values in (found.count, found.clipped)))
    return {part: errors_of(getattr(weights, part), weights.share) for part in CAUSES}


def test_unevenness_by_sign_is_visible_in_the_parts():
    parts = parts_of(1)
    assert parts["conditional"][0] < 0.02 < min(parts["composition"][0], parts["total"][0])


@pytest.mark.long
@pytest.mark.parametrize("epochs", [1, 4])
@pytest.mark.parametrize("num_prompts", [24, 240])
def test_the_intervals_of_every_part_cover_the_true_value(num_prompts, epochs):
    rng, held = np.random.default_rng(11), {part: [] for part in CAUSES}
    for _ in range(150):
        found = Clusters.of(*drawn_by_sign(rng, num_prompts, epochs, RISK)).reweighting()
        for part, truth in parts_of(epochs).items():
            for error, one in zip(truth, (getattr(found, part).max, getattr(found, part).mean), strict=True):
                assert one.interval[0] <= one.corrected <= one.value <= one.interval[1]
                held[part].append(one.interval[0] <= error <= one.interval[1])
    assert all(np.mean(values) >= 0.92 for values in held.values()), {part: np.mean(values) for part, values in held.items()}


@pytest.mark.long
@pytest.mark.parametrize("epochs", [1, 4])
@pytest.mark.parametrize("num_prompts", [48, 240])
def test_the_noise_floor_given_the_sign_is_the_lre_of_a_rule_that_is_even_given_the_sign(num_prompts, epochs):
    rng, even = np.random.default_rng(5), np.tile([2.9, 0.45], (6, 1))
    found = [Clusters.of(*drawn_by_sign(rng, num_prompts, epochs, even)).reweighting().conditional.max for _ in range(150)]
    assert np.mean([error.noise for error in found]) == pytest.approx(np.mean([error.value for error in found]), rel=0.1)


def test_an_interval_from_almost_no_data_is_everything_instead_of_nan():
    almost_none = Proportions(np.array([0.1, 0.9]), np.array([0.577, 0.577]), np.array([1.003, 1.003]), np.eye(2))
    low, high = almost_none.interval()
    assert (low < 1e-20).all()
    assert (high == 1).all()


def test_one_prompt_says_almost_nothing():
    found = Clusters.of(np.array([0, 1, 2]), np.array([0.0, 1.0, 0.0]), np.zeros(3))
    low, high = found.reweighting().total.max.interval
    assert (low, high) == (0, pytest.approx(1, abs=0.3))
    low, high = found.proportions()  # Clopper and Pearson's for one row
    assert low[:3] == pytest.approx([0, 0.025, 0], abs=1e-6)
    assert high[:3] == pytest.approx([0.975, 1, 0.975], abs=1e-6)
    assert np.isnan([low[3:], high[3:]]).all()


def test_problems_with_equal_values_have_the_assumed_design_effect():
    # 80 rows with a correlation of .55 within 5 problems have the weight of 80 / (1 + 15 x .55) = 8.65 independent ones
    end = stats.beta.ppf(0.975, 0.5, 80 / 9.25 + 0.5)
    assert mean_interval(np.zeros(5), np.full(5, 16.0)) == pytest.approx((0, end), rel=1e-6)
    assert mean_interval(np.full(5, 16.0), np.full(5, 16.0)) == pytest.approx((1 - end, 1), rel=1e-6)
    assert end > 0.2  # five problems without a right response do not show that all are unsolvable


@pytest.mark.parametrize("number", [96, 1200])
def test_the_unit_of_a_decision_does_not_matter(number):
    # a rule that clips the same share of every prompt's tokens has intervals in proportion, and no design effect of whole rows
    rng = np.random.default_rng(4)
    rows, shares = np.arange(number), rng.uniform(0.01, 0.03, number)
    low, high = Clusters.of(rows % 6, shares, rows).proportions()
    error = shares.std() / np.sqrt(number / 6)
    assert (high - low).mean() == pytest.approx(2 * 1.97 * error, rel=0.1 if number > 1000 else 0.5)
