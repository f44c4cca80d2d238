"""Portraits: edges and weights with numbers worked by hand; swapped edges and a missing square root are visible."""

import math

import pytest
import torch

from rlzoo import ClipResult, load_zoo, ops
from rlzoo.testing import portrait
from rlzoo.testing.portrait import LENGTHS
from tests.kit.correct import DualClip, Mean, Parabola, PlainGradient, Root, Soft, Token


def test_a_token_rule_cuts_at_the_logarithms_of_its_bounds_at_every_length():
    drawn = portrait(Token())
    for length in LENGTHS:
        edge = drawn.edges[length]
        assert edge.high == pytest.approx(math.log(1.2), rel=1e-3)
        assert edge.low == pytest.approx(math.log(0.8), rel=1e-3)
        assert edge.ceiling is edge.inward is None
    assert drawn.positive == pytest.approx({0.5: 0.5, 0.8: 0.8, 1.0: 1.0, 1.25: 0.0, 2.0: 0.0}, rel=1e-3)
    assert drawn.negative[2.0] == pytest.approx(2.0, rel=1e-3)


def test_the_portrait_shows_whether_a_band_grows_with_the_square_root_of_the_length():
    edges = portrait(Root()).edges
    assert [edges[length].high for length in LENGTHS] == pytest.approx([0.03, 0.12, 0.48, 1.92], rel=1e-3)
    edges = portrait(Mean()).edges
    assert [edges[length].high for length in LENGTHS] == pytest.approx([0.05] * 4, rel=1e-3)


def test_asymmetric_edges_are_not_swapped():
    edge = portrait(Token(clip_low=0.1, clip_high=0.4), lengths=(16,)).edges[16]
    assert (edge.high, edge.low) == (pytest.approx(math.log(1.4), rel=1e-3), pytest.approx(math.log(0.9), rel=1e-3))


def test_a_dual_clip_has_a_ceiling_and_a_parabola_changes_sign():
    assert portrait(DualClip(), lengths=(1,)).edges[1].ceiling == pytest.approx(math.log(3), rel=1e-3)
    drawn = portrait(Parabola(), lengths=(1,))
    assert drawn.edges[1].high == pytest.approx(math.log(1.2), rel=1e-2)
    assert drawn.positive[2.0] == pytest.approx(2 * (1 - 1 / 0.2), rel=1e-3)  # r A (1 - (r - 1) / width)


def test_a_gradient_that_fades_to_zero_ends_where_it_reaches_zero():
    class Fades(Token):
        name = "fades"

        def __call__(self, inputs):
            log_ratio = ops.log_ratio(inputs)
            outward = (log_ratio.detach() * inputs.advantages.sign()).clamp(min=0)
            gate = (1 - (outward / torch.where(inputs.advantages > 0, 0.2, 0.1)) ** 2).clamp(min=0)
            return ClipResult(gate * log_ratio.exp() * inputs.advantages, log_ratio.detach(), gate == 0)

    edge = portrait(Fades(), lengths=(16,)).edges[16]
    assert (edge.high, edge.low) == (pytest.approx(0.2, rel=1e-3), pytest.approx(-0.1, rel=1e-3))


@pytest.mark.parametrize("rule", [PlainGradient, Soft])
def test_a_rule_that_never_cuts_has_no_edge(rule):
    drawn = portrait(rule(), lengths=(1, 256))
    assert {value for edge in drawn.edges.values() for value in (edge.high, edge.low, edge.ceiling, edge.inward)} == {None}


@pytest.mark.long
@pytest.mark.parametrize("name", load_zoo())
def test_every_rule_of_the_zoo_has_a_portrait_and_weighs_1_at_ratio_1(name):
    drawn = portrait(load_zoo()[name](), lengths=(1, 16))
    assert drawn.positive[1.0] in (None, 1.0)  # None: it has no gradient there
    is_two_sided = any(edge.inward is not None for edge in drawn.edges.values())
    assert is_two_sided == (name == "sao")  # whose mask has no sign
