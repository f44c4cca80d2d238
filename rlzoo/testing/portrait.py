"""Measures where a rule cuts the gradient, by response length, and how it weights the gradient, by ratio."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlzoo.core import ops
from rlzoo.core.policy import ClipPolicy
from rlzoo.testing.data import evaluate, uniform_inputs

LENGTHS = (1, 16, 256, 4096)
RATIOS = (0.5, 0.8, 1.0, 1.25, 2.0)
WEIGHED = 16  # length in tokens of the responses on which weights are measured
FURTHEST = {1: 3.9, -1: 19.0}  # maximum upward and downward shift of a token in nats; the tokens have probability exp(-4)
STEPS, HALVINGS = 24, 18
BEFORE, FADED = 0.9, 1e-3
"""A gradient that at 0.9 of the edge is below this share of the gradient at ratio 1 is not cut there: it underflows."""


@dataclass(frozen=True, slots=True)
class Edges:
    """Judged log-ratios beyond which the gradient is cut or reversed for one response length. An absent edge is None."""

    high: float | None  # A > 0, upward
    low: float | None  # A < 0, downward
    ceiling: float | None  # A < 0, upward, as with a dual clip
    inward: float | None  # A > 0, downward, as with a mask that has no sign


@dataclass(frozen=True, slots=True)
class Portrait:
    """The measurements of one rule."""

    name: str
    edges: Mapping[int, Edges]  # by response length in tokens
    positive: Mapping[float, float | None]  # gradient relative to ratio 1, by ratio, for A > 0; negative if reversed
    negative: Mapping[float, float | None]  # the same for A < 0


def portrait(policy: ClipPolicy, lengths: Sequence[int] = LENGTHS, ratios: Sequence[float] = RATIOS) -> Portrait:
    """Measure a policy on single responses whose tokens share a log-ratio. Ratios are always those that the rule judges.

    The tokens have probability exp(-4) ≈ 0.018 at sampling time, which matters for rules whose band depends on the probability.
    For rules that judge individual tokens, the last token is measured.
    """
    edges = {
        length: Edges(
            high=_edge(policy, length, advantage=1, way=1),
            low=_edge(policy, length, advantage=-1, way=-1),
            ceiling=_edge(policy, length, advantage=-1, way=1),
            inward=_edge(policy, length, advantage=1, way=-1),
        )
        for length in lengths
    }
    positive, negative = ({ratio: _weight(policy, ratio, advantage) for ratio in ratios} for advantage in (1, -1))
    return Portrait(policy.name, edges, positive, negative)


def _measured(policy: ClipPolicy, token: float, length: int, advantage: int) -> tuple[float, float]:
    """Return the judged log-ratio of a response's last token and the token's gradient in the direction of the advantage."""
    result, gradient = evaluate(policy, uniform_inputs(policy, [token], length, float(advantage)))
    return float(result.log_ratio[0, -1]), float(gradient[0, -1]) * advantage


def _edge(policy: ClipPolicy, length: int, advantage: int, way: int) -> float | None:
    """Find where the gradient vanishes or reverses by moving outwards from ratio 1 in geometric steps and then bisecting."""
    at_one = _measured(policy, 0.0, length, advantage)[1]
    if at_one <= 0:
        return None
    slope = max(_slope(policy, length, advantage), 1e-6)
    smallest, largest = 1e-5 / slope, min(FURTHEST[way], (ops.LOG_RATIO_LIMIT - 0.5) / slope)
    inside, outside = 0.0, None
    for step in range(STEPS + 1):
        token = way * smallest * (largest / smallest) ** (step / STEPS)
        if _measured(policy, token, length, advantage)[1] <= 0:
            outside = token
            break
        inside = token
    if outside is None:
        return None
    for _ in range(HALVINGS):
        middle = (inside + outside) / 2
        if _measured(policy, middle, length, advantage)[1] > 0:
            inside = middle
        else:
            outside = middle
    judged = sum(_measured(policy, token, length, advantage)[0] for token in (inside, outside)) / 2
    is_reversed = _measured(policy, outside * 1.01, length, advantage)[1] < 0
    before = _measured(policy, inside * BEFORE, length, advantage)[1]
    return judged if is_reversed or before > FADED * at_one else None


def _weight(policy: ClipPolicy, ratio: float, advantage: int) -> float | None:
    """Return the gradient at a judged ratio as a share of that at ratio 1. It is negative if the gradient is reversed."""
    at_one, slope = _measured(policy, 0.0, WEIGHED, advantage)[1], _slope(policy, WEIGHED, advantage)
    if at_one == 0 or slope <= 0:
        return None
    return _measured(policy, math.log(ratio) / slope, WEIGHED, advantage)[1] / at_one + 0.0  # avoids -0


def _slope(policy: ClipPolicy, length: int, advantage: int) -> float:
    """Return the change in the judged log-ratio when every token shifts by one nat: 1 for a mean, the length for a sum."""
    return _measured(policy, 0.25, length, advantage)[0] / 0.25
