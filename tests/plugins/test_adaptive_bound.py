"""The finite-time bound on the length error of adaptive FSPO (docs/explanation/adaptive-bound.md), on synthetic streams.

The weights and errors of knots are computed here from single responses, without the rule's code.
"""

import functools
import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from rlzoo import ClipStats
from rlzoo.core.fairness import bin_edges
from tests.plugins.test_fspo_adaptive import ADAPTIVE, decisions, sampled
from tests.rules import few

BELOW, ABOVE = 0, 1
TARGET, RATE, LIMIT, HEAVIEST = 0.1, 2.0, 20.0, 3.0  # the rule's defaults and its two limits


@dataclass
class Stretch:
    """Sums for every sign and knot, over updates with the same number of knots."""

    first: np.ndarray  # (2, K) offsets
    last: np.ndarray
    low: np.ndarray  # the smallest value of each offset
    high: np.ndarray
    weight: np.ndarray  # sum of the knots' weights
    excess: np.ndarray  # sum of weight x (clip fraction - target)
    cut: np.ndarray  # what the limit on offsets removed, in nats

    @property
    def mean_error(self):
        return self.excess / np.where(self.weight > 0, self.weight, 1.0)


def offsets_of(policy):
    return np.array([policy.offsets_low, policy.offsets_high])


def knot_sums(policy, edges, length, advantage, clipped):
    """Return weight and weighted clip fraction - target of every sign and knot, from single responses."""
    at = np.log(policy.lengths)
    weight, excess = np.zeros((2, len(at))), np.zeros((2, len(at)))
    for sign, rows in ((BELOW, advantage < 0), (ABOVE, advantage > 0)):
        for cell in range(len(edges) - 1):
            inside = (length <= edges[cell + 1]) & ((length > edges[cell]) if cell else np.full(len(length), True))
            mine = clipped[rows & inside & ((length > edges[cell]) | (cell == 0))]
            if len(mine) == 0:
                continue
            where = math.log(length[rows & inside].mean())
            hat = np.array([np.interp(where, at, np.eye(len(at))[j]) for j in range(len(at))])
            weight[sign] += hat * len(mine)
            excess[sign] += hat * (mine - TARGET).sum()
    mean = len(length) / (2 * len(at))
    factor = np.minimum(weight / mean, HEAVIEST) / np.where(weight > 0, weight, 1.0)
    return weight * factor, excess * factor


def stretches(policy, updates, draw, seed=0, decide=decisions):
    """Return the stretches of a stream with equally many knots, and rows of length, advantage, decision and 1 / responses."""
    rng, found, rows = torch.Generator().manual_seed(seed), [], []
    for number in range(updates):
        length, total, advantage = draw(number, rng)
        clipped = decide(policy, length, total, advantage).float()
        edges = bin_edges(length)
        following = policy.updated(ClipStats.of(edges, length, advantage, clipped, total))
        if policy.lengths:
            before = offsets_of(policy)
            if not found or found[-1].first.shape != before.shape:
                zero = np.zeros(before.shape)
                found.append(Stretch(before, before, before, before, zero, zero, zero))
            now = found[-1]
            weight, excess = knot_sums(policy, *(each.double().numpy() for each in (edges, length, advantage, clipped)))
            wanted = before + policy.rate * excess
            now.weight, now.excess = now.weight + weight, now.excess + excess
            now.cut = now.cut + wanted - wanted.clip(-LIMIT, LIMIT)
            if len(following.lengths) == len(policy.lengths):
                now.last = offsets_of(following)
            else:  # the number of knots grew, on the same curve
                now.last = wanted.clip(-LIMIT, LIMIT)
                at = np.log(policy.lengths), np.log(following.lengths)
                curve = [np.interp(at[1], at[0], side) for side in now.last]
                np.testing.assert_allclose(offsets_of(following), curve, atol=1e-11)
            now.low, now.high = np.minimum(now.low, now.last), np.maximum(now.high, now.last)
            share = torch.full_like(length, 1 / len(length))
            rows.append(torch.stack([length, advantage, clipped, share], dim=1).double())
        policy = following
    return found, torch.cat(rows)


@functools.cache
def drifting(draw):
    """Return the only stretch, and the rows, of 300 updates."""
    (stretch,), rows = stretches(ADAPTIVE(), 300, draw)
    return stretch, rows


def assert_identity(stretch, rate=RATE):
    """For every sign and knot, the sum of errors is the change of the offset, plus what the limit removed, over the rate."""
    np.testing.assert_allclose(stretch.excess, (stretch.last - stretch.first + stretch.cut) / rate, atol=1e-11)


def growing(number, rng):
    """The spread grows tenfold over 300 updates."""
    length, total, advantage = sampled(0.8, 0.1 * 10 ** (number / 300), 0.0, rng)
    return length, total, advantage


def jumping(number, rng):
    """The spread jumps by a factor of 10 up or down every 60 updates."""
    return sampled(0.6, 0.05 if number // 60 % 2 else 0.5, 0.0, rng)


def lengthening(number, rng):
    """Lengths grow from 100 to 1,600 tokens over 200 updates."""
    length, total, advantage = sampled(0.9, 0.3, 0.0, rng)
    factor = 16 ** min(number / 200, 1.0) / 4
    return (length * factor).round().clamp(min=1), total * factor**0.9, advantage


def one_sided(number, rng):
    """Every third update has no response with A > 0, and no update has one longer than 40 tokens with A < 0."""
    length, total, advantage = sampled(0.5, 0.2, 0.0, rng)
    advantage = torch.where(length > 40, advantage.abs(), advantage)
    keep = (advantage < 0) | torch.tensor(number % 3 > 0)
    return length[keep], total[keep], advantage[keep]


def alike_at_first(number, rng):
    """All responses of the first 50 updates have 64 tokens, which gives one knot; later there are six."""
    length, total, advantage = sampled(0.5, 0.2, 0.0, rng)
    return (torch.full_like(length, 64.0) if number < 50 else length), total, advantage


@pytest.mark.long
@pytest.mark.parametrize("draw", [growing, jumping, lengthening])
def test_errors_add_up_to_the_change_of_the_offset(draw):
    stretch, _ = drifting(draw)
    assert not stretch.cut.any()
    assert_identity(stretch)


@pytest.mark.parametrize(("draw", "number"), [(one_sided, 1), (alike_at_first, 2)])
def test_errors_add_up_with_empty_cells_and_between_changes_of_the_knots(draw, number):
    found, _ = stretches(ADAPTIVE(), 100, draw)
    assert len(found) == number
    for stretch in found:
        assert_identity(stretch)


def test_moving_knots_keep_their_offsets():
    policy = ADAPTIVE(rate=0.0, lengths=(16.0, 64.0), offsets_low=(0.5, -0.5), offsets_high=(1.0, 2.0))
    length = torch.tensor([32.0, 256.0])
    after = policy.updated(ClipStats.of(torch.tensor([32.0, 100.0, 256.0]), length, torch.ones(2), torch.zeros(2), length))
    # a twentieth of the way in log length: 16 x 2^.05, 64 x 4^.05
    assert after.lengths == pytest.approx((16 * 2**0.05, 64 * 4**0.05))
    assert (after.offsets_low, after.offsets_high) == (policy.offsets_low, policy.offsets_high)


def test_no_knot_weighs_more_than_three_and_the_weights_of_an_update_add_up_to_twice_the_knots():
    policy = ADAPTIVE(lengths=(16.0, 64.0), offsets_low=(0.0, 0.0), offsets_high=(0.0, 0.0))
    length, advantage = torch.tensor([16.0, 32.0, 64.0, 64.0]), torch.tensor([1.0, 1.0, 1.0, -1.0])
    edges = torch.tensor([16.0, 20.0, 40.0, 64.0])
    stats = ClipStats.of(edges, length, advantage, torch.zeros(4), torch.zeros(4))
    # one response has the mean weight; the one of 32 tokens counts half for either knot
    for sign, expected in ((BELOW, [0.0, 1.0]), (ABOVE, [1.5, 1.5])):
        assert policy.errors(stats, sign)[0].tolist() == pytest.approx(expected)
    alone = ADAPTIVE(lengths=(16.0, 64.0, 256.0), offsets_low=(0.0,) * 3, offsets_high=(0.0,) * 3)
    short = torch.full((4,), 16.0)
    stats = ClipStats.of(torch.tensor([16.0, 16.0]), short, torch.ones(4), torch.zeros(4), torch.zeros(4))
    assert alone.errors(stats, ABOVE)[0].tolist() == [3.0, 0.0, 0.0]  # 6 without the limit


@pytest.mark.parametrize("draw", few([jumping, growing, lengthening]))
def test_the_bound_holds_while_spread_and_lengths_drift(draw):
    stretch, rows = drifting(draw)
    span = stretch.high - stretch.low
    assert (np.abs(stretch.mean_error) <= span / (RATE * stretch.weight) + 1e-12).all()
    assert (np.abs(stretch.mean_error) < 0.02).all()
    assert span.max() < 8  # nats: a tenfold spread is 2.3, and jumps overshoot
    # over all knots of a sign: the clipped share, with each update counting equally, up to the limit on weights
    for sign, mine in ((BELOW, rows[:, 1] < 0), (ABOVE, rows[:, 1] > 0)):
        clipped, share = rows[mine, 2], rows[mine, 3]
        error = float(((clipped - TARGET) * share).sum() / share.sum())
        from_offsets = (stretch.last - stretch.first)[sign].sum() / (RATE * stretch.weight[sign].sum())
        assert error == pytest.approx(from_offsets, abs=1e-9)
        assert abs(error) < 0.01


@pytest.mark.long
def test_clip_rates_stay_level_while_lengths_grow_sixteenfold():
    _, rows = drifting(lengthening)
    rows = rows[20 * 128 : 200 * 128]
    edges = bin_edges(rows[:, 0].float()).double()
    for sign in (rows[:, 1] < 0, rows[:, 1] > 0):
        for low, high in itertools.pairwise(edges.tolist()):
            part = rows[sign & (rows[:, 0] > low) & (rows[:, 0] <= high), 2]
            assert float(part.mean()) == pytest.approx(TARGET, abs=0.04)


@pytest.mark.parametrize("per_batch", [None, 4])
def test_with_one_knot_an_adversary_cannot_move_the_mean_error_further_than_the_range_of_the_edge(per_batch):
    # all are clipped if the offset is below 1.5, none if it is above, and none in the first update of a batch
    calls = itertools.count()

    def adversary(policy, length, total, advantage):
        at_ratio_one = per_batch is not None and next(calls) % per_batch == 0
        return torch.full_like(length, float(policy.offsets_high[0] < 1.5 and not at_ratio_one))

    def draw(number, rng):
        return torch.full((8,), 64.0), torch.zeros(8), torch.ones(8)

    policy = ADAPTIVE(lengths=(64.0,), offsets_low=(1.5,), offsets_high=(1.5,))
    (stretch,), _ = stretches(policy, 400, draw, decide=adversary)
    assert_identity(stretch)
    # the weight is 2, because all responses have one sign
    low, high = 1.5 - (per_batch or 1) * 2 * RATE * TARGET, 1.5 + 2 * RATE * (1 - TARGET)
    assert stretch.low[ABOVE, 0] >= low - 1e-9
    assert stretch.high[ABOVE, 0] <= high + 1e-9
    assert stretch.weight[ABOVE, 0] == 800
    assert abs(stretch.mean_error[ABOVE, 0]) <= (high - low) / (RATE * 800)


def widening(policy, half_width=0.5):
    """The next length and clip fraction from an adversary that drives two knots apart, while its edge stays within +-.5."""
    first, last = policy.offsets_high
    rise = first + last <= 0
    edge = half_width if rise else -half_width
    way = 0.0 if first == last and rise else 1.0 if first == last else min(max((edge - first) / (last - first), 0.0), 1.0)
    return 10 * 10**way, 0.2 if rise else 0.0


@pytest.mark.parametrize("updates", [100, 400])
def test_with_two_knots_an_adversary_drives_them_apart_no_faster_than_the_root_of_the_updates(updates):
    policy = ADAPTIVE(lengths=(10.0, 100.0), offsets_low=(0.0, 0.0), offsets_high=(0.0, 0.0))
    total = weights = np.zeros(2)
    for _ in range(updates):
        length, fraction = widening(policy)
        rows = torch.full((8,), length)
        stats = ClipStats.of(torch.tensor([1.0, 1e3]), rows, torch.ones(8), torch.full((8,), fraction), torch.zeros(8))
        weight, error = (each.numpy() for each in policy.errors(stats, ABOVE))
        total, weights = total + weight * error, weights + weight
        policy = policy.updated(stats)
    offsets = np.array(policy.offsets_high)
    np.testing.assert_allclose(total, offsets / RATE, atol=1e-9)
    # the page's bound on the squared distance per unit of weight: rate (1 - target) (2 x .5 + 3 rate (1 - target))
    assert (offsets**2).sum() <= RATE * 0.9 * (2 * 0.5 + HEAVIEST * RATE * 0.9) * weights.sum()
    assert (offsets**2).sum() > updates / 4  # the growth with the square root is real


def test_a_sign_that_cannot_be_clipped_ends_at_the_limit_and_the_identity_holds():
    def never_upwards(number, rng):
        length, total, advantage = sampled(0.5, 0.2, 0.0, rng)
        return length, -total.abs(), advantage  # A > 0 is only clipped above 0

    (stretch,), _ = stretches(ADAPTIVE(), 200, never_upwards)
    assert_identity(stretch)
    assert (stretch.last[ABOVE] == -LIMIT).all()
    assert (stretch.cut[ABOVE] < 0).all()
    assert stretch.mean_error[ABOVE] == pytest.approx([-TARGET] * 6)
    assert not stretch.cut[BELOW].any()
    assert (np.abs(stretch.mean_error[BELOW]) < 0.02).all()
