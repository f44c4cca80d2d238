"""Adaptive FSPO: its band in closed form, and its convergence to the band that clips the target share for any law of S."""

import dataclasses
import itertools
import math

import numpy as np
import pydantic
import pytest
import torch

from rlzoo import ClipInputs, ClipStats, load_zoo
from rlzoo.core.fairness import bin_edges
from rlzoo.testing import evaluate, off_policy_inputs
from tests.plugins.closed_form import ClosedForm, closed_form_test
from tests.rules import few

ADAPTIVE = load_zoo()["fspo-adaptive"]
STATE = {
    "width_low": 0.02, "width_high": 0.05, "lengths": [2.0, 5.0, 9.0], "offsets_low": [0.1, 0.5, -0.2],
    "offsets_high": [-0.6, 0.0, 0.3], "ceiling_factor": 1.5,
}  # fmt: skip


def rule(
    log_probs, old_log_probs, rollout_log_probs, advantages, mask, *, width_low=0.03, width_high=0.03, lengths=(),
    offsets_low=(), offsets_high=(), ceiling_factor=3.0,
):  # fmt: skip
    """min(w A, clip(w) A) on ratios, and max(that, cap A) for A < 0, row by row."""
    rows, columns = mask.shape
    objective, clipped, derivative = np.zeros((rows, 1)), np.zeros((rows, 1), dtype=bool), np.zeros((rows, columns))
    for b in range(rows):
        tokens = [t for t in range(columns) if mask[b, t]]
        total = sum(log_probs[b, t] - old_log_probs[b, t] for t in tokens)
        widths = []
        for width, offsets in ((width_low, offsets_low), (width_high, offsets_high)):
            offset = np.interp(math.log(len(tokens)), np.log(lengths), offsets) if len(lengths) else 0.0
            widths.append(width * math.sqrt(len(tokens)) * math.exp(offset))
        low, high = widths
        advantage = advantages[b, 0]
        ratio = math.exp(total)
        edge = min(max(ratio, math.exp(-low)), math.exp(high))
        value = min(ratio * advantage, edge * advantage)
        cut = value < ratio * advantage
        if advantage < 0 and ceiling_factor is not None:
            cap = math.exp(ceiling_factor * low)
            cut, value = cut or cap * advantage > value, max(value, cap * advantage)
        objective[b, 0], clipped[b, 0] = value, cut
        for t in tokens:
            derivative[b, t] = 0.0 if cut else ratio * advantage
    return ClosedForm(objective, derivative, clipped)


test_equals_the_closed_form = closed_form_test("fspo-adaptive", rule, [{}, STATE, {"ceiling_factor": None}])


def test_before_the_first_update_it_is_fspo():
    inputs = off_policy_inputs(ADAPTIVE())
    result, gradient = evaluate(ADAPTIVE(), inputs)
    expected, expected_gradient = evaluate(load_zoo()["fspo"](), inputs)
    torch.testing.assert_close(result.objective, expected.objective)
    torch.testing.assert_close(gradient, expected_gradient)
    assert torch.equal(result.clipped, expected.clipped)


def sampled(exponent, scale, drift, rng, number=128, longest=400):
    """Return responses of 10 to 400 tokens whose summed log-ratio has spread scale x (L / 60)^exponent around drift x L."""
    length = torch.exp(torch.empty(number).uniform_(math.log(10), math.log(longest), generator=rng)).round()
    total = drift * length + scale * (length / 60) ** exponent * torch.randn(number, generator=rng)
    return length, total, torch.randn(number, generator=rng)


def decisions(policy, length, total, advantage):
    """Return what the policy clips for the given sums; each response is laid out as one value spread over its tokens."""
    mask = torch.arange(int(length.max())) < length[:, None]
    log_probs = torch.where(mask, (total / length)[:, None], 0.0)
    return policy(ClipInputs(log_probs, torch.zeros_like(log_probs), advantage[:, None], mask)).clipped[:, 0]


def trained(policy, updates, draw, seed=0):
    """Return the policy after some updates on data from ``draw``, and rows of length, advantage and decision."""
    rng = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(updates):
        length, total, advantage = draw(number, rng)
        clipped = decisions(policy, length, total, advantage).float()
        rows.append(torch.stack([length, advantage, clipped], dim=1))
        policy = policy.updated(ClipStats.of(bin_edges(length), length, advantage, clipped, total))
    return policy, rows


def assert_level(rows, target=0.1, within=0.025, limits=(0, 35, 115, 500)):
    for sign in (rows[:, 1] > 0, rows[:, 1] < 0):
        for low, high in itertools.pairwise(limits):
            part = rows[sign & (rows[:, 0] >= low) & (rows[:, 0] < high)]
            assert float(part[:, 2].mean()) == pytest.approx(target, abs=within), (low, high)


@pytest.mark.parametrize(("exponent", "scale", "drift"), few([(0.8, 5.0, 0.02), (0.5, 0.2, 0.0), (0.95, 0.02, -0.0001)]))
def test_every_length_and_sign_is_clipped_at_the_target(exponent, scale, drift):
    _, rows = trained(ADAPTIVE(), 300, lambda _, rng: sampled(exponent, scale, drift, rng))
    settled = torch.cat(rows[150:])
    # 19,200 responses: a share of 0.1 has a standard error of 0.002, in a third of them of one sign 0.005
    assert float(settled[:, 2].mean()) == pytest.approx(0.1, abs=0.01)
    assert_level(settled)


@pytest.mark.long
def test_every_length_is_clipped_equally_if_the_spread_is_not_a_power_of_the_length():
    def draw(_, rng):
        length, _, advantage = sampled(0.5, 0.2, 0.0, rng)
        middle = ((length.log() - math.log(63)) / math.log(6.3)).square()  # 0 in the middle, 1 at both ends
        spread = 0.05 + 0.35 * middle  # an eighth of the spread at the ends
        return length, spread * torch.randn(len(length), generator=rng), advantage

    _, rows = trained(ADAPTIVE(), 400, draw)
    assert_level(torch.cat(rows[200:]), within=0.03)


@pytest.mark.long
def test_the_knots_follow_when_responses_grow():
    # from 10-100 tokens to 10-1,600 over 200 updates
    policy, rows = trained(
        ADAPTIVE(), 400, lambda number, rng: sampled(0.9, 0.3, 0.0, rng, longest=100 + 7.5 * min(number, 200))
    )
    assert policy.lengths[-1] > 700
    assert_level(torch.cat(rows[250:]), limits=(0, 80, 400, 2000))


def test_another_target_is_reached():
    _, rows = trained(ADAPTIVE(target_clip_fraction=0.25), 200, lambda _, rng: sampled(0.7, 0.1, 0.0, rng))
    assert float(torch.cat(rows[100:])[:, 2].mean()) == pytest.approx(0.25, abs=0.015)


def test_updates_at_ratio_one_do_not_change_the_initial_state():
    length, advantage = torch.tensor([10.0, 20.0, 40.0]), torch.tensor([1.0, -1.0, 1.0])
    stats = ClipStats.of(bin_edges(length), length, advantage, torch.zeros(3), torch.zeros(3))
    assert ADAPTIVE().updated(stats) == ADAPTIVE()


def test_the_first_update_that_moved_sets_the_scale():
    # S = .1 sqrt(L) for all: a band 1.5 times as wide, .15 sqrt(L)
    length = torch.tensor([16.0, 64.0])
    stats = ClipStats.of(
        torch.tensor([16.0, 32.0, 64.0]), length, torch.tensor([1.0, -1.0]), torch.ones(2), 0.1 * length.sqrt()
    )
    started = ADAPTIVE().updated(stats)
    assert started.lengths == pytest.approx((16.0, 64.0))
    assert started.offsets_low == started.offsets_high == pytest.approx((math.log(5.0),) * 2)


def test_an_update_narrows_a_band_that_clips_too_little_and_widens_one_that_clips_too_much():
    policy = ADAPTIVE(rate=1.0, lengths=(16.0, 64.0), offsets_low=(0.0, 0.0), offsets_high=(0.0, 0.0))
    length = torch.tensor([16.0, 16.0, 64.0, 64.0])
    clipped = torch.tensor([1.0, 0.0, 0.0, 0.0])
    stats = ClipStats.of(torch.tensor([16.0, 32.0, 64.0]), length, torch.ones(4), clipped, clipped)
    after = policy.updated(stats)
    # half of the short ones were clipped, with a target of a tenth: .4; none of the long ones: -.1; there was no A < 0, so
    # either knot has twice the mean weight of two knots and two signs
    assert after.offsets_high == pytest.approx((0.8, -0.2))
    assert after.offsets_low == (0.0, 0.0)


def test_initially_equal_lengths_get_separate_knots_later():
    policy = ADAPTIVE(lengths=(16.0,), offsets_low=(0.5,), offsets_high=(-0.5,), rate=0.0)
    length = torch.tensor([16.0, 64.0])
    after = policy.updated(ClipStats.of(torch.tensor([16.0, 32.0, 64.0]), length, torch.ones(2), torch.zeros(2), length))
    assert (after.lengths, after.offsets_low, after.offsets_high) == ((16.0, 64.0), (0.5, 0.5), (-0.5, -0.5))


def test_an_empty_update_changes_nothing():
    none = torch.zeros(0)
    nothing = ClipStats.of(torch.tensor([1.0, 2.0, 3.0]), none, none, none, none)
    for policy in (ADAPTIVE(), ADAPTIVE(**STATE)):
        assert policy.updated(nothing) == policy


def test_a_state_that_does_not_fit_together_is_refused():
    with pytest.raises(pydantic.ValidationError, match="must have the same number of entries"):
        ADAPTIVE(lengths=(1.0, 2.0), offsets_low=(0.0,), offsets_high=(0.0, 0.0))
    with pytest.raises(pydantic.ValidationError, match="lengths must be in ascending order"):
        ADAPTIVE(lengths=(2.0, 1.0), offsets_low=(0.0, 0.0), offsets_high=(0.0, 0.0))


def test_ratio_one_is_never_clipped():
    inputs = off_policy_inputs(ADAPTIVE())
    same = dataclasses.replace(inputs, log_probs=inputs.old_log_probs)
    for policy in (ADAPTIVE(**STATE), ADAPTIVE(width_low=1e-6, width_high=1e-6)):
        result, gradient = evaluate(policy, same)
        assert not result.clipped.any()
        torch.testing.assert_close(gradient, torch.where(inputs.response_mask, inputs.advantages, 0.0))


def test_an_outlier_moves_the_band_no_further_than_any_clipped_response():
    rng = torch.Generator().manual_seed(3)
    length, total, advantage = sampled(0.5, 0.1, 0.0, rng)
    policy = ADAPTIVE().updated(ClipStats.of(bin_edges(length), length, advantage, torch.zeros(len(length)), total))
    after = []
    for outlier in (1.0, 1000.0):
        total[0] = outlier
        clipped = decisions(policy, length, total, advantage.abs()).float()
        after.append(policy.updated(ClipStats.of(bin_edges(length), length, advantage, clipped, total)))
    assert after[0] == after[1]
