"""Length bins, length reweighting error and effective sample size on numbers worked by hand."""

import pytest
import torch

from rlzoo.fairness import bin_edges, bin_index, bin_sums, effective_sample_size, length_reweighting_error


def test_bins_are_quantiles_and_ties_share_one():
    lengths = torch.tensor([1, 2, 3, 4, 5, 6, 7])
    assert bin_edges(lengths, 3).tolist() == [1.0, 3.0, 5.0, 7.0]
    assert bin_index(lengths, bin_edges(lengths, 3)).tolist() == [0, 0, 0, 1, 1, 2, 2]
    same = torch.full((5,), 9)
    assert bin_index(same, bin_edges(same, 3)).tolist() == [0] * 5


def test_length_reweighting_error_of_two_bins():
    # acceptance 1 and 1/2, shares 1/2: mean 3/4, weights 4/3 and 2/3, errors 1/3 each
    worst, mean = length_reweighting_error(torch.tensor([2.0, 2.0]), torch.tensor([0.0, 1.0]))
    assert (float(worst), float(mean)) == pytest.approx((1 / 3, 1 / 3))


def test_the_largest_error_and_the_mean_one_differ():
    # shares .5 .25 .25, acceptance 1 .5 .5: mean .75, weights 4/3, 2/3, 2/3: errors 1/3 each, mean 1/3
    # acceptance 1 1 .2: mean .8, weights 1.25, 1.25, .25: errors .25 .25 .75, mean .125 + .0625 + .1875 = .375
    count = torch.tensor([[2.0, 1.0, 1.0], [2.0, 1.0, 1.0]])
    worst, mean = length_reweighting_error(count, torch.tensor([[0.0, 0.5, 0.5], [0.0, 0.0, 0.8]]))
    assert worst.tolist() == pytest.approx([1 / 3, 0.75])
    assert mean.tolist() == pytest.approx([1 / 3, 0.375])


def test_lre_is_zero_when_every_length_is_clipped_alike_and_nan_when_all_is():
    count = torch.tensor([10.0, 20.0, 30.0])
    assert float(length_reweighting_error(count, count / 2)[0]) == pytest.approx(0.0, abs=1e-12)
    assert float(length_reweighting_error(count, 0 * count)[0]) == 0.0  # exactly
    assert length_reweighting_error(count, count)[0].isnan()


def test_empty_bins_count_for_nothing():
    # one bin holds everything: whatever is clipped, the mix of lengths cannot change
    worst, mean = length_reweighting_error(torch.tensor([0.0, 4.0, 0.0]), torch.tensor([0.0, 1.0, 0.0]))
    assert (float(worst), float(mean)) == pytest.approx((0.0, 0.0), abs=1e-12)


def test_bin_sums():
    assert bin_sums(torch.tensor([0, 2, 2]), torch.tensor([1.0, 2.0, 3.0]), 3).tolist() == [1.0, 0.0, 5.0]


def test_effective_sample_size():
    # (1 + 1 + 0 + 0)^2 / (4 * 2) = 1/2; (3 + 1)^2 / (2 * 10) = 0.8
    assert effective_sample_size(torch.tensor([1.0, 1.0, 0.0, 0.0])) == pytest.approx(0.5)
    assert effective_sample_size(torch.tensor([3.0, 1.0])) == pytest.approx(0.8)
    assert effective_sample_size(torch.ones(7)) == pytest.approx(1.0)
    assert effective_sample_size(torch.zeros(3)) == 0.0
