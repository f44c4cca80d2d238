"""The tensor functions for writing policies."""

import dataclasses

import pytest
import torch

from rlzoo import ClipBand, ClipInputs, ops


def test_log_space_clamp_stays_finite_where_the_textbook_form_does_not():
    log_ratio = torch.tensor([[200.0]], requires_grad=True)
    advantage = torch.tensor([[1.0]])
    textbook = torch.minimum(log_ratio.exp() * advantage, log_ratio.exp().clamp(0.8, 1.2) * advantage)
    textbook.backward()
    assert log_ratio.grad.isnan().all()  # 0 * inf
    log_ratio.grad = None
    result = ops.clipped_surrogate(log_ratio, advantage, ops.ratio_band(0.2, 0.2, None, like=log_ratio))
    result.objective.backward()
    assert result.objective.item() == pytest.approx(1.2)
    assert log_ratio.grad.item() == 0


def test_the_limit_of_twenty_applies_to_both_signs_and_is_not_a_clip():
    log_ratio = torch.tensor([[30.0], [30.0], [-30.0], [25.0]])
    advantages = torch.tensor([[-1.0], [0.0], [1.0], [1.0]])
    clamped, clipped = ops.clamp_by_advantage(log_ratio, advantages, ClipBand(torch.tensor(-0.1), torch.tensor(0.1)))
    assert clamped.flatten().tolist() == pytest.approx([20.0, 20.0, -20.0, 0.1])
    assert clipped.flatten().tolist() == [False, False, False, True]


def test_masked_positions_affect_neither_value_nor_gradient():
    log_probs = torch.tensor([[-1.0, float("nan"), -2.0]], requires_grad=True)
    old = torch.tensor([[-1.5, float("inf"), -2.0]])
    mask = torch.tensor([[True, False, True]])
    log_ratio = ops.log_ratio(ClipInputs(log_probs, old, torch.ones(1, 1), mask))
    assert log_ratio.tolist() == [[0.5, 0.0, 0.0]]
    log_ratio.sum().backward()
    assert log_probs.grad.tolist() == [[1.0, 0.0, 1.0]]


def test_the_denominator_of_a_log_ratio_is_the_named_one():
    numbers = [torch.full((1, 1), value, dtype=torch.float64) for value in (-1.0, -1.5, -3.0, -6.0)]
    log_probs, old, rollout, ref = numbers
    inputs = ClipInputs(log_probs, old, torch.ones(1, 1), torch.ones(1, 1).bool(), rollout, ref_log_probs=ref)
    ratios = {name: ops.log_ratio(inputs, against=name).item() for name in ("old", "rollout", "ref")}
    assert ratios == {"old": 0.5, "rollout": 2.0, "ref": 5.0}
    missing = dataclasses.replace(inputs, rollout_log_probs=None, ref_log_probs=None)
    assert ops.log_ratio(missing, against="rollout").item() == 0.5
    for name, wrong in (("reference", inputs), ("ref", missing)):
        with pytest.raises(ValueError, match=f"against='{name}'"):
            ops.log_ratio(wrong, against=name)


def test_lengths_sums_and_means_are_per_response():
    values = torch.tensor([[1.0, 2.0, 6.0], [4.0, float("nan"), float("nan")], [9.0, 9.0, 9.0]])
    mask = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    assert ops.lengths(mask).tolist() == [[3.0], [1.0], [1.0]]
    assert ops.sequence_sum(values, mask).tolist() == [[9.0], [4.0], [0.0]]
    assert ops.sequence_mean(values, mask).tolist() == [[3.0], [4.0], [0.0]]


def test_ratio_band_is_in_log_space():
    band = ops.ratio_band(0.2, 0.28, 3.0, like=torch.zeros(1))
    # log 0.8, log 1.28, log 3
    assert [edge.item() for edge in (band.low, band.high, band.ceiling)] == pytest.approx(
        [-0.22314, 0.24686, 1.09861], abs=1e-5
    )
    assert ops.ratio_band(0.2, 0.2, None, like=torch.zeros(1)).ceiling is None


def test_narrow_ratio_bands_keep_their_width():
    # log(1 + 3e-4) = 2.99955009e-4, log(1 - 2e-8) = -2.00000002e-8
    band = ops.ratio_band(2e-8, 3e-4, None, like=torch.zeros(1))
    assert band.high.item() == pytest.approx(2.99955009e-4, rel=1e-7)
    assert band.low.item() == pytest.approx(-2.00000002e-8, rel=1e-7)
