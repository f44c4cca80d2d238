"""Comparisons follow their definitions, and do not name winners that are not there."""

import itertools

import numpy as np
import pytest

from rlzoo.measure.comparison import differences, estimate, holm, iqm, probability_of_improvement


def by_seed(values):
    return dict(enumerate(values))


def test_the_interquartile_mean_leaves_a_quarter_out_at_each_end():
    assert iqm(np.array([1.0, 2, 3, 4])) == 2.5  # the middle two
    assert iqm(np.array([0.70, 0.72, 0.74, 0.76, 0.98])) == pytest.approx(0.74)  # the middle three
    assert iqm(np.array([5.0])) == 5.0


def test_the_probability_of_improvement_counts_pairs_and_half_of_the_ties():
    # pairs (1,0) > (1,1) = (1,2) <, (3,0) > (3,1) > (3,2) >: 4 wins and a tie of six
    assert probability_of_improvement(np.array([1.0, 3.0]), np.array([0.0, 1.0, 2.0])) == pytest.approx(4.5 / 6)


def test_the_probability_of_improvement_is_a_mean_over_pairs():
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, 5, 7), rng.integers(0, 5, 9)
    pairs = [(a > b) + (a == b) / 2 for a in first for b in second]
    assert probability_of_improvement(first, second) == pytest.approx(np.mean(pairs))
    (pair,) = differences({"a": by_seed(first), "b": by_seed(second)})
    low, high = pair.probability_interval
    assert 0 <= low < pair.probability_of_improvement < high <= 1


def test_where_nothing_varies_there_is_no_interval():
    for scores in ([0.5], [0.5, 0.5, 0.5]):
        assert (estimate(scores).mean_interval, estimate(scores).iqm_interval) == (None, None)
    (pair,) = differences({"a": by_seed([0.5] * 5), "b": by_seed([0.5] * 5)})
    assert (pair.mean, pair.interval, pair.probability_of_improvement, pair.probability_interval) == (0, None, 0.5, None)
    assert pair.verdict == "no difference that 5 seeds can show"


def test_the_same_difference_with_every_seed_is_one():
    scores = {"a": by_seed([0.2, 0.3, 0.4, 0.5, 0.6]), "b": by_seed([0.1, 0.2, 0.3, 0.4, 0.5])}
    (pair,) = differences(scores)
    assert (pair.mean, pair.interval) == (pytest.approx(0.1), None)
    assert pair.verdict == "a above b"


@pytest.mark.parametrize(("num_seeds", "of_mean", "of_iqm"), [(5, 0.82, 0.89), (10, 0.90, 0.93), (20, 0.92, 0.94)])
def test_intervals_hold_as_often_as_the_docstring_says(num_seeds, of_mean, of_iqm):
    rng = np.random.default_rng(0)
    found = [estimate(rng.normal(size=num_seeds)) for _ in range(400)]
    # the standard error of 400 draws is .02
    assert np.mean([one.mean_interval[0] <= 0 <= one.mean_interval[1] for one in found]) == pytest.approx(of_mean, abs=0.05)
    assert np.mean([one.iqm_interval[0] <= 0 <= one.iqm_interval[1] for one in found]) == pytest.approx(of_iqm, abs=0.05)


def test_the_sign_flip_test_is_exact():
    # all five differences positive and unequal: only the two patterns with one sign are as extreme, of 32
    (pair,) = differences({"a": by_seed([1.1, 1.2, 1.3, 1.4, 1.5]), "b": by_seed([0.0] * 5)})
    assert pair.p_value == pair.adjusted_p_value == pytest.approx(2 / 32)
    # 3 -1 1 1 1: means as far from 0 as 1 by brute force
    gap = np.array([3.0, -1, 1, 1, 1])
    flipped = [abs(np.dot(signs, gap)) >= abs(gap.sum()) - 1e-9 for signs in itertools.product((1, -1), repeat=5)]
    (pair,) = differences({"a": by_seed(gap), "b": by_seed([0.0] * 5)})
    assert pair.p_value == pytest.approx(np.mean(flipped))


def test_holms_correction():
    # sorted .01 .03 .04: times 3, 2, 1, never falling: .03 .06 .06
    assert holm([0.04, None, 0.01, 0.03]) == [pytest.approx(0.06), None, pytest.approx(0.03), pytest.approx(0.06)]


def test_differences_are_paired_by_seed():
    scores = {"a": {0: 0.5, 1: 0.9, 2: 0.1}, "b": {1: 0.8, 2: 0.0, 7: 1.0}}
    (pair,) = differences(scores)
    assert pair.num_seeds == 2
    assert pair.mean == pytest.approx(0.1)  # although a's own mean is below b's
    assert "too few seeds (2 in common" in pair.verdict


def test_policies_without_a_common_seed_have_no_difference():
    (pair,) = differences({"a": {0: 0.5}, "b": {1: 0.8}})
    assert (pair.num_seeds, pair.mean, pair.interval, pair.p_value) == (0, None, None, None)


@pytest.mark.parametrize(
    ("names", "num_seeds", "most"), [("ab", 5, 0.0625), ("ab", 10, 0.1), ("abcd", 5, 0), ("abcd", 10, 0.1)]
)
def test_no_winner_is_named_among_equals(names, num_seeds, most):
    rng = np.random.default_rng(1)
    named = 0
    for _ in range(100):
        scores = {name: by_seed(rng.normal(size=num_seeds)) for name in names}
        named += any("above" in pair.verdict for pair in differences(scores))
    assert named / 100 <= most + 2 * (most / 100) ** 0.5  # two standard errors


def test_a_verdict_says_how_many_seeds_it_would_take():
    # six pairs: 6 * 2 / 2^6 = .19 is above .1, 6 * 2 / 2^7 = .094 is not
    scores = {name: by_seed(place + np.arange(7) / 100) for place, name in enumerate("abcd")}
    assert {pair.verdict for pair in differences(scores)} == {
        "b above a",
        "c above a",
        "d above a",
        "c above b",
        "d above b",
        "d above c",
    }
    fewer = {name: by_seed(list(values.values())[:5]) for name, values in scores.items()}
    assert {pair.verdict for pair in differences(fewer)} == {"no difference that 5 seeds can show; so many pairs need 7"}


def test_a_plain_winner_is_named_with_enough_seeds_and_not_with_three():
    rng = np.random.default_rng(2)
    noise = rng.normal(scale=0.01, size=(2, 10))
    better, worse = by_seed(0.8 + noise[0]), by_seed(0.7 + noise[1])
    (pair,) = differences({"worse": worse, "better": better})
    assert pair.verdict == "better above worse"
    few = {name: dict(list(values.items())[:3]) for name, values in {"worse": worse, "better": better}.items()}
    assert "no winner is named" in differences(few)[0].verdict
    assert differences({"worse": worse, "better": better})[0] == pair  # the same numbers every time
