"""Comparisons follow their definitions, and do not name winners that are not there."""

import itertools

import numpy as np
import pytest

from rlzoo.analysis.comparison import differences, estimate, holm, iqm, probability_of_improvement


def by_seed(values):
    return dict(enumerate(values))


def test_the_interquartile_mean_leaves_a_quarter_out_at_each_end():
    assert iqm(np.array([1.0, 2, 3, 4])) == 2.5  # the middle two
    assert iqm(np.array([0.70, 0.72, 0.74, 0.76, 0.98])) == pytest.approx(0.74)  # the middle three
    assert iqm(np.array([5.0])) == 5.0


def test_the_probability_of_improvement_counts_pairs_and_half_of_the_ties():
    # pairs (1,0) > (1,1) = (1,2) <, (3,0) > (3,1) > (3,2) >: 4 wins and a tie of six
    assert probability_of_improvement([1.0, 3.0], [0.0, 1.0, 2.0]) == pytest.approx(4.5 / 6)


def test_a_single_seed_has_no_interval_and_equal_ones_an_empty_one():
    assert estimate([0.5]).mean_interval is None
    assert estimate([0.5, 0.5]).mean_interval == (0.5, 0.5)


def test_five_seeds_hold_the_mean_four_times_out_of_five():
    rng = np.random.default_rng(0)
    intervals = [estimate(rng.normal(size=5)).mean_interval for _ in range(300)]
    assert 0.76 <= np.mean([low <= 0 <= high for low, high in intervals]) <= 0.9


def test_twenty_seeds_hold_it_about_as_often_as_they_say():
    rng = np.random.default_rng(0)
    intervals = [estimate(rng.normal(size=20)).mean_interval for _ in range(300)]
    assert 0.9 <= np.mean([low <= 0 <= high for low, high in intervals]) <= 0.97


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


def test_no_winner_is_named_among_equals():
    rng = np.random.default_rng(1)
    for num_seeds in (5, 10):
        named = 0
        for _ in range(100):
            scores = {name: by_seed(rng.normal(size=num_seeds)) for name in "abcd"}
            named += any("above" in pair.verdict for pair in differences(scores))
        assert named <= 14  # the level is a tenth: 10 of 100, give or take 3


def test_a_plain_winner_is_named_with_enough_seeds_and_not_with_three():
    rng = np.random.default_rng(2)
    noise = rng.normal(scale=0.01, size=(2, 10))
    better, worse = by_seed(0.8 + noise[0]), by_seed(0.7 + noise[1])
    (pair,) = differences({"worse": worse, "better": better})
    assert pair.verdict == "better above worse"
    few = {name: dict(list(values.items())[:3]) for name, values in {"worse": worse, "better": better}.items()}
    assert "no winner is named" in differences(few)[0].verdict
    assert differences({"worse": worse, "better": better})[0] == pair  # the same numbers every time
