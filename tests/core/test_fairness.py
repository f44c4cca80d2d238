"""Length bins, length reweighting error and effective sample size on numbers worked by hand."""

import pytest
import torch

from rlzoo.core.fairness import LengthWeights, bin_edges, bin_index, bin_sums, effective_sample_size


def test_bins_are_quantiles_and_ties_share_one():
    lengths = torch.tensor([1, 2, 3, 4, 5, 6, 7])
    assert bin_edges(lengths, 3).tolist() == [1.0, 3.0, 5.0, 7.0]
    assert bin_index(lengths, bin_edges(lengths, 3)).tolist() == [0, 0, 0, 1, 1, 2, 2]
    same = torch.full((5,), 9)
    assert bin_index(same, bin_edges(same, 3)).tolist() == [0] * 5


def errors(count, clipped):
    """Return ``lre_max`` and ``lre_mean`` of sums by bin, all of one sign."""
    weights = LengthWeights.of(count[..., None], clipped[..., None])
    for part in (weights.conditional, weights.total):  # with one sign, both are the same
        torch.testing.assert_close(part, weights.total, equal_nan=True)
    torch.testing.assert_close(weights.composition.nan_to_num(1.0), torch.ones_like(weights.total))
    error = (weights.total - 1).abs()
    return error.amax(-1), (weights.share * error).sum(-1)


def test_length_reweighting_error_of_two_bins():
    # acceptance 1 and 1/2, shares 1/2: mean 3/4, weights 4/3 and 2/3, errors 1/3 each
    worst, mean = errors(torch.tensor([2.0, 2.0]), torch.tensor([0.0, 1.0]))
    assert (float(worst), float(mean)) == pytest.approx((1 / 3, 1 / 3))


def test_the_largest_error_and_the_mean_one_differ():
    # shares .5 .25 .25, acceptance 1 .5 .5: mean .75, weights 4/3, 2/3, 2/3: errors 1/3 each, mean 1/3
    # acceptance 1 1 .2: mean .8, weights 1.25, 1.25, .25: errors .25 .25 .75, mean .125 + .0625 + .1875 = .375
    count = torch.tensor([[2.0, 1.0, 1.0], [2.0, 1.0, 1.0]])
    worst, mean = errors(count, torch.tensor([[0.0, 0.5, 0.5], [0.0, 0.0, 0.8]]))
    assert worst.tolist() == pytest.approx([1 / 3, 0.75])
    assert mean.tolist() == pytest.approx([1 / 3, 0.375])


def test_lre_is_zero_under_equal_clipping_and_nan_when_everything_is_clipped():
    count = torch.tensor([10.0, 20.0, 30.0])
    assert float(errors(count, count / 2)[0]) == pytest.approx(0.0, abs=1e-12)
    assert float(errors(count, 0 * count)[0]) == 0.0  # exactly
    assert errors(count, count)[0].isnan()


def test_empty_bins_are_ignored():
    # one bin holds everything: whatever is clipped, the mix of lengths cannot change
    worst, mean = errors(torch.tensor([0.0, 4.0, 0.0]), torch.tensor([0.0, 1.0, 0.0]))
    assert (float(worst), float(mean)) == pytest.approx((0.0, 0.0), abs=1e-12)


def test_the_error_of_a_rule_that_is_even_for_each_sign_is_due_to_composition():
    # A < 0 is clipped .4 and A > 0 not at all, at both lengths. 2 of 10 short responses have A < 0, and 6 of 10 long ones.
    # acceptance: A < 0 .6, A > 0 1, short (2 x .6 + 8) / 10 = .92, long (6 x .6 + 4) / 10 = .76, all .84
    weights = LengthWeights.of(torch.tensor([[2.0, 8.0], [6.0, 4.0]]), torch.tensor([[0.8, 0.0], [2.4, 0.0]]))
    assert weights.conditional.tolist() == pytest.approx([1, 1])
    assert weights.composition.tolist() == pytest.approx([0.92 / 0.84, 0.76 / 0.84])
    assert weights.total.tolist() == pytest.approx(weights.composition.tolist())


def test_an_even_total_does_not_hide_a_rule_that_is_uneven_for_each_sign():
    # short: 5 with A < 0, acceptance .6, and 5 with A > 0, 1: .8. long: 10 with A > 0, acceptance .8. The total is even.
    # a sign's share: 5/20 and 15/20. A < 0 has no long response, so its acceptance there is the sign's, .6:
    # short .25 x .6 + .75 x 1 = .9, long .25 x .6 + .75 x .8 = .75, mean .825
    # acceptance of A > 0 is (5 + 8) / 15 = .8667: composition short (.6 + .8667) / 2 / .8 = .9167, long .8667 / .8 = 1.0833
    weights = LengthWeights.of(torch.tensor([[5.0, 5.0], [0.0, 10.0]]), torch.tensor([[2.0, 0.0], [0.0, 2.0]]))
    assert weights.total.tolist() == pytest.approx([1, 1])
    assert weights.conditional.tolist() == pytest.approx([0.9 / 0.825, 0.75 / 0.825])
    assert weights.composition.tolist() == pytest.approx([0.9166667, 1.0833333])


def test_bin_sums():
    assert bin_sums(torch.tensor([0, 2, 2]), torch.tensor([1.0, 2.0, 3.0]), 3).tolist() == [1.0, 0.0, 5.0]


def test_effective_sample_size():
    # (1 + 1 + 0 + 0)^2 / (4 * 2) = 1/2; (3 + 1)^2 / (2 * 10) = 0.8
    assert effective_sample_size(torch.tensor([1.0, 1.0, 0.0, 0.0])) == pytest.approx(0.5)
    assert effective_sample_size(torch.tensor([3.0, 1.0])) == pytest.approx(0.8)
    assert effective_sample_size(torch.ones(7)) == pytest.approx(1.0)
    assert effective_sample_size(torch.zeros(3)) == 0.0
