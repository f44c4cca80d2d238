"""Comparisons follow their definitions, and do not name winners that do not exist."""

import numpy as np
import pytest
from scipy import stats

from rlzoo.measure.comparison import (
    LEVEL,
    POWER,
    against,
    best_rules,
    detectable,
    differences,
    estimate,
    holm,
    iqm,
)  # fmt: skip


def by_seed(values):
    return dict(enumerate(values))


def test_the_interquartile_mean_leaves_a_quarter_out_at_each_end():
    assert iqm(np.array([1.0, 2, 3, 4])) == 2.5  # mean of the middle two
    assert iqm(np.array([0.70, 0.72, 0.74, 0.76, 0.98])) == pytest.approx(0.74)  # mean of the middle three
    assert iqm(np.array([5.0])) == 5.0


def test_constant_values_have_no_interval():
    for scores in ([0.5], [0.5, 0.5, 0.5]):
        assert (estimate(scores).mean_interval, estimate(scores).iqm_interval) == (None, None)
    (pair,) = differences({"a": by_seed([0.5] * 5), "b": by_seed([0.5] * 5)})
    assert (pair.mean, pair.interval) == (0, None)
    assert pair.verdict == "no difference shown"


def test_a_difference_that_is_equal_for_every_seed_has_a_verdict():
    scores = {"a": by_seed([0.2, 0.3, 0.4, 0.5, 0.6]), "b": by_seed([0.1, 0.2, 0.3, 0.4, 0.5])}
    (pair,) = differences(scores)
    assert (pair.mean, pair.interval) == (pytest.approx(0.1), None)
    assert pair.verdict == "a above b"


DRAWS = {
    "normal": lambda rng, size: rng.normal(size=size),
    "log-normal": lambda rng, size: np.exp(rng.normal(size=size) / 2),
}


@pytest.mark.long
@pytest.mark.parametrize("num_seeds", [5, 8, 12, 20])
@pytest.mark.parametrize(("name", "truth", "least"), [("normal", 0.0, 0.94), ("log-normal", np.exp(1 / 8), 0.90)])
def test_intervals_have_the_documented_coverage(name, truth, least, num_seeds):
    rng = np.random.default_rng(0)
    draws = DRAWS[name](rng, (1000, num_seeds))
    center = iqm(DRAWS[name](rng, (20_000, num_seeds))).mean()
    found = [estimate(scores) for scores in draws]
    of_mean = np.mean([one.mean_interval[0] <= truth <= one.mean_interval[1] for one in found])
    of_iqm = np.mean([one.iqm_interval[0] <= center <= one.iqm_interval[1] for one in found])
    margin = 2 * (least * (1 - least) / 1000) ** 0.5
    assert least - margin <= of_mean <= 0.97
    assert 0.89 - margin <= of_iqm <= 0.97


def test_the_paired_t_interval_and_test_by_hand():
    # differences 1 2 3 4 5: mean 3, standard deviation 1.5811, error .7071; t of .975 with 4 degrees is 2.7764
    (pair,) = differences({"a": by_seed([1, 2, 3, 4, 5]), "b": by_seed([0.0] * 5)})
    assert pair.interval == pytest.approx((3 - 2.7764 * 0.70711, 3 + 2.7764 * 0.70711), abs=1e-3)
    assert pair.p_value == pair.adjusted_p_value == pytest.approx(stats.ttest_rel([1, 2, 3, 4, 5], [0] * 5).pvalue)


def test_the_interval_of_the_interquartile_mean_by_hand():
    # 0 1 2 3 10: one value off each end leaves 1 2 3; winsorised 1 1 2 3 3 has standard deviation 1,
    # the error is 1 sqrt(5) / 3 = .7454, t of .975 with 2 degrees is 4.3027
    found = estimate([0.0, 10.0, 1.0, 3.0, 2.0])
    assert found.iqm == 2.0
    assert found.iqm_interval == pytest.approx((2 - 4.3027 * 0.74536, 2 + 4.3027 * 0.74536), abs=1e-3)


@pytest.mark.parametrize(("num_seeds", "num_pairs"), [(5, 1), (5, 6), (12, 3)])
def test_a_detectable_difference_is_found_with_the_stated_power(num_seeds, num_pairs):
    rng = np.random.default_rng(4)
    gaps = 0.02 * rng.normal(size=(4000, num_seeds)) + detectable(0.02, num_seeds, num_pairs)
    found = np.mean(stats.ttest_1samp(gaps, 0.0, axis=1).pvalue <= LEVEL / num_pairs)
    assert found == pytest.approx(POWER, abs=0.02)


def test_holms_correction():
    # sorted .01 .03 .04: times 3, 2, 1, never falling: .03 .06 .06
    assert holm([0.04, None, 0.01, 0.03]) == [pytest.approx(0.06), None, pytest.approx(0.03), pytest.approx(0.06)]


def test_differences_are_paired_by_seed():
    scores = {"a": {0: 0.5, 1: 0.9, 2: 0.1}, "b": {1: 0.8, 2: 0.0, 7: 1.0}}
    (pair,) = differences(scores)
    assert pair.num_seeds == 2
    assert pair.mean == pytest.approx(0.1)  # although a's own mean is below b's
    assert pair.verdict == "too few seeds"


def test_policies_without_a_common_seed_have_no_difference():
    (pair,) = differences({"a": {0: 0.5}, "b": {1: 0.8}})
    assert (pair.num_seeds, pair.mean, pair.interval, pair.p_value) == (0, None, None, None)


@pytest.mark.long
@pytest.mark.parametrize("name", list(DRAWS))
@pytest.mark.parametrize(("names", "num_seeds"), [("ab", 5), ("ab", 12), ("abcd", 5), ("abcd", 12)])
def test_no_winner_is_named_among_equals(names, num_seeds, name):
    rng, number = np.random.default_rng(1), 300
    named = 0
    for _ in range(number):
        scores = {each: by_seed(DRAWS[name](rng, num_seeds)) for each in names}
        named += any("above" in pair.verdict for pair in differences(scores))
    assert named / number <= LEVEL + 2 * (LEVEL / number) ** 0.5  # two standard errors


def test_the_level_holds_for_all_pairs_together():
    # three pairs; p of a - b alone is .02, and Holm's correction makes it .06
    rng = np.random.default_rng(0)
    noise = rng.normal(size=6)
    gap = (noise - noise.mean()) / stats.sem(noise)  # a standard error of 1
    shift = float(stats.t.ppf(1 - 0.02 / 2, 5))
    scores = {"a": by_seed(gap + shift), "b": by_seed(np.zeros(6))}
    (pair,) = differences(scores)
    assert pair.p_value == pytest.approx(0.02)
    assert pair.verdict == "a above b"
    three = differences({**scores, "c": by_seed(100 * rng.normal(size=6))})
    assert three[0].adjusted_p_value == pytest.approx(0.06)
    assert three[0].verdict == "no difference shown"


def test_a_plain_winner_is_named_with_enough_seeds_and_not_with_three():
    rng = np.random.default_rng(2)
    noise = rng.normal(scale=0.01, size=(2, 10))
    better, worse = by_seed(0.8 + noise[0]), by_seed(0.7 + noise[1])
    (pair,) = differences({"worse": worse, "better": better})
    assert pair.verdict == "better above worse"
    few = {name: dict(list(values.items())[:3]) for name, values in {"worse": worse, "better": better}.items()}
    assert differences(few)[0].verdict == "too few seeds"
    assert differences({"worse": worse, "better": better})[0] == pair  # the same numbers every time


def test_intervals_against_a_control_by_hand():
    # differences 1 2 3 4 5 as above; for two comparisons, t of .9875 with 4 degrees is 3.4954: 3 +- 3.4954 * .7071
    pairs = against("b", {"a": by_seed([1, 2, 3, 4, 5]), "b": by_seed([0.0] * 5), "c": by_seed([0.0] * 5)})
    assert pairs["a"].interval == pytest.approx((0.5284, 5.4716), abs=1e-4)
    assert pairs["a"].adjusted_p_value == pytest.approx(2 * 0.0132, abs=1e-4)  # Holm's, for two comparisons
    assert pairs["c"].interval is None
    assert [pair.verdict for pair in pairs.values()] == ["a above b", "no difference shown"]


@pytest.mark.long
def test_simultaneous_intervals_and_the_set_of_the_best_rules_have_their_coverage():
    rng, truth, held, kept = np.random.default_rng(5), np.linspace(0, 2, 12), 0, 0
    for _ in range(300):
        shared = rng.normal(size=8)  # what a seed changes for all rules
        scores = {f"r{k}": by_seed(truth[k] + shared + rng.normal(size=8)) for k in range(12)}
        pairs = against("r0", scores)
        held += all(low <= truth[k] <= high for k in range(1, 12) for low, high in [pairs[f"r{k}"].interval])
        kept += "r11" in best_rules(scores)
    assert held / 300 >= 0.95 - 2 * (0.95 * 0.05 / 300) ** 0.5
    assert kept / 300 >= 0.95
