"""FSPO's own laws: the band is on the sum and grows with sqrt(L); both published mistakes are detected."""

import math

import pytest
import torch
from rlzoo_fspo import FSPO
from rlzoo_gspo import GSPO
from rlzoo_rloo import RLOO

from rlzoo import ClipInputs


def response(log_ratios, advantage):
    old = torch.full((1, len(log_ratios)), -1.0)
    mask = torch.ones_like(old, dtype=torch.bool)
    return ClipInputs(old + torch.tensor([log_ratios]), old, torch.tensor([[advantage]]), mask)


def test_fspo_band_on_hand_worked_numbers():
    # L = 4: band +-0.03 * 2 = +-0.06, ceiling 0.18. Four tokens of 0.02: S = 0.08.
    up = FSPO()(response([0.02] * 4, 1.0))
    assert up.objective.item() == pytest.approx(math.exp(0.06), rel=1e-6)
    assert bool(up.clipped)
    free = FSPO()(response([0.02] * 4, -1.0))
    assert free.objective.item() == pytest.approx(-math.exp(0.08), rel=1e-6)
    assert not bool(free.clipped)
    # S = 0.2 is over the ceiling of 0.18
    capped = FSPO()(response([0.05] * 4, -1.0))
    assert capped.objective.item() == pytest.approx(-math.exp(0.18), rel=1e-6)
    assert bool(capped.clipped)


@pytest.mark.parametrize("length", [1, 9, 100, 900])
def test_fspo_accepts_up_to_the_square_root_of_the_length_exactly(length):
    # eps/sqrt(L) on the mean only happens to equal eps*sqrt(L) on the sum: at mean m the sum is m L, so the band
    # on the mean is 0.03/sqrt(L). With eps*sqrt(L) on the mean, or on tokens, other responses are clipped.
    edge = 0.03 * math.sqrt(length)
    assert not bool(FSPO()(response([edge / length * 0.99] * length, 1.0)).clipped)
    assert bool(FSPO()(response([edge / length * 1.01] * length, 1.0)).clipped)
    assert FSPO()(response([edge / length * 1.5] * length, 1.0)).objective.item() == pytest.approx(math.exp(edge), rel=1e-5)


def test_fspo_weight_is_the_importance_ratio_not_its_root():
    # eps/sqrt(L) on the mean accepts the same responses, but weighs them by exp(S/L): 16 tokens of 0.005, S = 0.08
    assert FSPO()(response([0.005] * 16, 1.0)).objective.item() == pytest.approx(math.exp(0.08), rel=1e-6)


def test_fspo_judges_the_response_not_its_tokens():
    # eps*sqrt(L) on token ratios (band +-0.06 at L = 4) would clip the first token; the sum, 0.05, is inside
    assert not bool(FSPO()(response([0.2, -0.05, -0.05, -0.05], 1.0)).clipped.any())
    assert FSPO()(response([0.2, -0.05, -0.05, -0.05], 1.0)).objective.shape == (1, 1)


def test_drift_centres_the_band():
    # L = 100, drift -0.001: centre -0.1, band [-0.4, 0.2]; without drift [-0.3, 0.3]
    inputs = response([-0.0035] * 100, -1.0)
    assert bool(FSPO()(inputs).clipped)
    assert not bool(FSPO(drift=-0.001)(inputs).clipped)
    assert bool(FSPO(drift=-0.001)(response([0.0025] * 100, 1.0)).clipped)


def clip_fractions(policy, lengths=(16, 64, 256, 1024), num_responses=4000, sigma=0.02):
    """Return the clip fraction by length for i.i.d. normal token log-ratios; S is then normal with variance sigma^2 L."""
    fractions = []
    for length in lengths:
        rng = torch.Generator().manual_seed(length)
        total = sigma * math.sqrt(length) * torch.randn(num_responses, 1, generator=rng)
        old = torch.zeros(num_responses, length)
        advantages = torch.ones(num_responses, 1)
        advantages[::2] = -1
        mask = torch.ones_like(old, dtype=torch.bool)
        result = policy(ClipInputs(old + total / length, old, advantages, mask))
        fractions.append(result.clipped.float().mean().item())
    return fractions


def test_fspo_clip_fraction_is_flat_in_length():
    # P(Z > 0.03/0.02 = 1.5) = 0.0668 on either side, at every length; 4 standard errors of 4000 draws are 0.016
    for fraction in clip_fractions(FSPO(width_ceiling=None)):
        assert fraction == pytest.approx(0.0668, abs=0.016)


def test_rloo_clips_long_responses_and_gspo_short_ones():
    # RLOO: edges log 1.2 = 0.182, log 0.8 = -0.223; sd of S at L = 16 is 0.08: P = .5 (.0113 + .0027) = .007;
    # at 1024 sd 0.64: P = .5 (.388 + .364) = .376.  GSPO 1e-3: sd of the mean .005 and .000625: P = .42 and .055
    rloo = clip_fractions(RLOO())
    assert rloo[0] == pytest.approx(0.007, abs=0.006)
    assert rloo[-1] == pytest.approx(0.376, abs=0.03)
    gspo = clip_fractions(GSPO(clip_low=1e-3, clip_high=1e-3))
    assert gspo[0] == pytest.approx(0.42, abs=0.03)
    assert gspo[-1] == pytest.approx(0.055, abs=0.015)


def test_default_widths_are_those_of_the_paper():
    assert (GSPO().clip_low, GSPO().clip_high) == (3e-4, 4e-4)
    assert (FSPO().width_low, FSPO().width_high, FSPO().drift, FSPO().width_ceiling) == (0.03, 0.03, 0.0, 0.09)
    assert (RLOO().advantage, RLOO().reduction) == ("leave_one_out", "sequence_mean")


def test_scaled_widens_every_width_and_nothing_else():
    wide = FSPO(drift=-0.01).scaled(2.0)
    assert (wide.width_low, wide.width_high, wide.width_ceiling, wide.drift) == (0.06, 0.06, 0.18, -0.01)
    with pytest.raises(ValueError, match="has no width to scale"):
        RLOO(clip_low=None, clip_high=None).scaled(2.0)
