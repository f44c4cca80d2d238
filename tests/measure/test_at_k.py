"""Measures of k responses: numbers worked by hand, every subset enumerated, and intervals with the stated coverage."""

from itertools import combinations
from math import comb

import numpy as np
import pytest

from rlzoo.measure.at_k import Completion, differences, estimates, majority, means, pass_at, passes
from rlzoo.measure.intervals import mean_interval


def outcome(rewards, groups=None, lengths=None):
    k = len(rewards)
    columns = zip(map(float, rewards), groups or range(k), lengths or [10] * k, strict=True)
    return tuple(Completion("", reward, group, length, finished=True) for reward, group, length in columns)


@pytest.mark.parametrize("num_samples", range(1, 8))
def test_pass_at_j_is_the_share_of_subsets_that_hold_a_right_response(num_samples):
    for num_right in range(num_samples + 1):
        rewards = [1] * num_right + [0] * (num_samples - num_right)
        for j in range(1, num_samples + 1):
            subsets = list(combinations(rewards, j))
            expected = sum(max(subset) for subset in subsets) / len(subsets)
            assert pass_at(num_samples, num_right, j) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("j", [1, 2, 4, 8, 16])
def test_pass_at_j_is_unbiased(j):
    # each response is right with probability .2, one of j with 1 - .8^j; the mean over all c of n = 16 must equal that
    chances = [comb(16, c) * 0.2**c * 0.8 ** (16 - c) for c in range(17)]
    mean = sum(chance * pass_at(16, c, j) for c, chance in enumerate(chances))
    assert mean == pytest.approx(1 - 0.8**j, abs=1e-12)


def test_pass_at_j_stays_exact_for_many_responses():
    # one of 4096 is right, and half of them are drawn: 1/2; the binomials have more than a thousand digits
    assert pass_at(4096, 1, 2048) == 0.5
    assert pass_at(4096, 0, 2048) == 0
    assert pass_at(4096, 2049, 2048) == 1


def test_j_are_the_powers_of_two_and_k():
    assert [passes(k) for k in (1, 2, 3, 16, 24)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8, 16], [1, 2, 4, 8, 16, 24]]


@pytest.mark.parametrize(
    ("groups", "rewards", "expected"),
    [
        ([0, 0, 2], [1, 1, 0], 1),  # two votes against one
        ([0, 1, 1], [1, 0, 0], 0),  # the right answer is outvoted
        ([0, 1, 2], [1, 0, 0], 1 / 3),  # three answers with one vote each, chosen at random
        ([0, 0, 2, 2], [0, 0, 0, 0], 0),  # a tie of wrong answers
        ([None, None, None, 3], [0, 0, 0, 1], 1),  # responses without an answer do not vote, however many there are
        ([None, None], [0, 0], 0),  # no votes
        ([0], [1], 1),
    ],
)
def test_majority_by_hand(groups, rewards, expected):
    assert majority(outcome(rewards, groups)) == pytest.approx(expected)
    assert majority(outcome(rewards, groups)[::-1]) == pytest.approx(expected)


def test_estimates_by_hand():
    # four of four right, and one of four right with three equal wrong ones:
    # mean (1 + .25) / 2; pass@2 (1 + 3/6) / 2; pass@4 1; majority (1 + 0) / 2
    found = estimates([outcome([1, 1, 1, 1], [0, 0, 0, 0]), outcome([0, 1, 0, 0], [0, 1, 0, 0])])
    values = {name: estimate.value for name, estimate in found.items()}
    assert values == {"mean@4": 0.625, "pass@1": 0.625, "pass@2": 0.75, "pass@4": 1.0, "maj@4": 0.5}
    assert means([outcome([1, 0, 0])]) == pytest.approx(
        {"mean@3": 1 / 3, "pass@1": 1 / 3, "pass@2": 2 / 3, "pass@3": 1, "maj@3": 1 / 3}
    )


def test_problems_without_a_value_are_left_out_of_an_interval():
    sums, counts = np.array([1.0, 0, 2, 0, 1]), np.array([2.0, 0, 2, 3, 2])
    kept = counts > 0
    assert mean_interval(sums, counts) == mean_interval(sums[kept], counts[kept])


def test_the_interval_of_a_mean_has_its_nominal_coverage():
    # problems of any difficulty, four responses each; the true mean is .5
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(100):
        sums = rng.binomial(4, rng.random(60)).astype(float)
        low, high = mean_interval(sums, np.full(60, 4.0))
        held += low <= 0.5 <= high
    assert 88 <= held <= 99


def test_differences_by_hand():
    # right responses (of 2) before: 2, 0, 1, 0; after: 2, 1, 1, 1; the last problem has no grade before
    before = [outcome([1, 1]), outcome([0, 0]), outcome([1, 0]), outcome([0, 0])]
    after = [outcome([1, 1]), outcome([1, 0]), outcome([0, 1]), outcome([1, 0])]
    ungraded = (Completion("", None, 0, 1, True),) * 2
    found = differences([*before, ungraded], [*after, outcome([1, 1])])
    assert found == differences(before, after)
    assert {name: one.value for name, one in found.items()} == pytest.approx(
        {"mean@2": 0.25, "pass@1": 0.25, "pass@2": 0.5, "maj@2": 0.25}
    )
    (old,), (new,) = ((estimates(side)["mean@2"],) for side in (before, after))
    down, up = (abs(end - old.value) for end in old.interval)
    low, high = (abs(end - new.value) for end in new.interval)
    r = np.corrcoef([1, 0, 0.5, 0], [1, 0.5, 0.5, 0.5])[0, 1]
    expected = 0.25 - (low**2 + up**2 - 2 * r * low * up) ** 0.5, 0.25 + (high**2 + down**2 - 2 * r * high * down) ** 0.5
    assert found["mean@2"].interval == pytest.approx(expected)
    assert differences([ungraded], [ungraded]) == {}


@pytest.mark.parametrize(("num_problems", "k", "shape"), [(30, 1, (0.5, 0.5)), (30, 8, (0.1, 1.5)), (300, 4, (0.3, 0.7))])
def test_the_interval_of_a_difference_has_its_nominal_coverage(num_problems, k, shape):
    # a third of the problems become as easy as any other, and the rest stay as they were, so the true difference is 0
    rng, groups = np.random.default_rng(0), list(range(k))
    held, wide = 0, 0
    for _ in range(200):
        chances = rng.beta(*shape, num_problems)
        others = np.where(rng.random(num_problems) < 1 / 3, rng.beta(*shape, num_problems), chances)
        sides = [[outcome(row, groups) for row in rng.random((num_problems, k)) < p[:, None]] for p in (chances, others)]
        (low, high), unpaired = (
            differences(*sides, votes=False)["pass@1"].interval,
            [estimates(side)["pass@1"] for side in sides],
        )
        held += low <= 0 <= high
        wide += high - low > sum(one.interval[1] - one.interval[0] for one in unpaired)
    assert 184 <= held <= 200
    assert wide == 0
