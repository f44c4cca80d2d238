"""Length bins, length reweighting error and effective sample size on numbers worked by hand."""

import pytest
import torch

from rlzoo.fairness import bin_edges, bin_index, clip_by_length, effective_sample_size


def test_bins_are_quantiles_and_ties_share_one():
    lengths = torch.tensor([1, 2, 3, 4, 5, 6, 7])
    assert bin_edges(lengths, 3).tolist() == [1.0, 3.0, 5.0, 7.0]
    assert bin_index(lengths, bin_edges(lengths, 3)).tolist() == [0, 0, 0, 1, 1, 2, 2]
    same = torch.full((5,), 9)
    assert bin_index(same, bin_edges(same, 3)).tolist() == [0] * 5


def test_length_reweighting_error_of_two_bins():
    # acceptance 1 and 1/2, shares 1/2: mean 3/4, weights 4/3 and 2/3, errors 1/3 each
    lengths = torch.tensor([1, 1, 2, 2])
    by_length = clip_by_length(lengths, torch.tensor([0.0, 0.0, 1.0, 0.0]), num_bins=2)
    assert by_length.fraction.tolist() == [0.0, 0.5]
    assert by_length.lre_max == pytest.approx(1 / 3)
    assert by_length.lre_mean == pytest.approx(1 / 3)


def test_lre_is_zero_when_every_length_is_clipped_alike_and_none_when_all_is():
    lengths = torch.arange(1, 61)
    half = torch.tensor([0.0, 1.0]).repeat(30)
    assert clip_by_length(lengths, half).lre_max == pytest.approx(0.0, abs=1e-12)
    assert clip_by_length(lengths, torch.zeros(60)).lre_max == 0.0  # exactly
    assert clip_by_length(lengths, torch.ones(60)).lre_max is None


def test_empty_bins_count_for_nothing():
    # all lengths equal: one bin holds everything, whatever is clipped the mix of lengths cannot change
    by_length = clip_by_length(torch.full((4,), 8), torch.tensor([1.0, 0.0, 0.0, 0.0]))
    assert by_length.count.tolist() == [4, 0, 0, 0, 0, 0]
    assert by_length.lre_max == pytest.approx(0.0, abs=1e-12)


def test_effective_sample_size():
    # (1 + 1 + 0 + 0)^2 / (4 * 2) = 1/2; (3 + 1)^2 / (2 * 10) = 0.8
    assert effective_sample_size(torch.tensor([1.0, 1.0, 0.0, 0.0])) == pytest.approx(0.5)
    assert effective_sample_size(torch.tensor([3.0, 1.0])) == pytest.approx(0.8)
    assert effective_sample_size(torch.ones(7)) == pytest.approx(1.0)
    assert effective_sample_size(torch.zeros(3)) == 0.0
