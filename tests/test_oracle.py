"""The oracle itself: its derivatives compared with central finite differences, its values with numbers worked by hand."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.oracle import (
    BoolArray,
    FloatArray,
    OracleResult,
    Reduction,
    fspo,
    gradient,
    group_mean,
    group_norm,
    grpo,
    gspo,
    leave_one_out,
    reduce,
    rloo,
)

Rule = Callable[..., OracleResult]
REDUCTIONS: tuple[Reduction, ...] = ("sequence_mean", "sequence_mean_token_sum", "constant_length", "token_mean")


def random_batch(seed: int, sigma: float) -> tuple[FloatArray, FloatArray, FloatArray, BoolArray]:
    """Return off-policy data of ragged length, with NaN or inf where masked, one empty row and some rows with A = 0."""
    rng = np.random.default_rng(seed)
    rows, columns = 16, 9
    mask = rng.random((rows, columns)) < 0.7
    mask[0] = False
    mask[1] = True
    old_log_probs = -rng.exponential(1.0, (rows, columns))
    log_probs = old_log_probs + rng.normal(0.0, sigma, (rows, columns))
    advantages = rng.normal(0.0, 1.0, (rows, 1))
    advantages[2:5] = 0.0
    log_probs[~mask] = np.nan
    old_log_probs[~mask] = np.inf
    return log_probs, old_log_probs, advantages, mask


def difference_error(
    values: Callable[[FloatArray], FloatArray], derivative: FloatArray, log_probs: FloatArray, mask: BoolArray
) -> float:
    """Return the largest deviation of ``derivative`` from central differences, relative above 1, except for entries at a kink.

    A kink is detected from the values alone: the one-sided differences disagree. ``values`` are summed after the difference is
    taken, so that a huge unchanged entry costs no precision.
    """
    step, worst, skipped = 1e-6, 0.0, 0
    here = values(log_probs)
    for b, t in np.argwhere(mask):
        up, down = log_probs.copy(), log_probs.copy()
        up[b, t] += step
        down[b, t] -= step
        above, below = values(up), values(down)
        forward, backward = float((above - here).sum()) / step, float((here - below).sum()) / step
        central = float((above - below).sum()) / (up[b, t] - down[b, t])
        if abs(forward - backward) > 1e-3 * max(1e-3, abs(forward), abs(backward)):
            skipped += 1
            continue
        worst = max(worst, abs(central - derivative[b, t]) / max(1.0, abs(central)))
    assert skipped <= 2
    assert (derivative[~mask] == 0).all()
    return worst


@pytest.mark.parametrize(
    ("rule", "sigma", "options"),
    [
        (grpo, 0.3, {}),
        (grpo, 0.3, {"clip_high": 0.28, "dual_clip": 1.3}),
        (grpo, 15.0, {}),
        (grpo, 15.0, {"dual_clip": 3.0}),
        (gspo, 1e-3, {}),
        (gspo, 1e-3, {"dual_clip": 1.0005}),
        (gspo, 40.0, {}),
        (rloo, 0.15, {}),
        (rloo, 0.15, {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.2}),
        (rloo, 0.15, {"clip_low": None, "clip_high": None}),
        (rloo, 10.0, {"clip_low": None, "clip_high": None}),
        (fspo, 0.05, {}),
        (fspo, 0.05, {"width_low": 0.02, "width_high": 0.04, "drift": -0.01, "width_ceiling": 0.06}),
        (fspo, 0.05, {"width_ceiling": None}),
        (fspo, 10.0, {}),
        (fspo, 10.0, {"width_ceiling": None}),
    ],
)
def test_derivatives_are_those_of_finite_differences(rule: Rule, sigma: float, options: dict[str, Any]) -> None:
    """For the objective, inside and beyond the +-20 limit, and for its reductions, at moderate ratios."""
    log_probs, old, advantages, mask = random_batch(0, sigma)

    def entries(varied: FloatArray) -> FloatArray:
        return rule(varied, old, advantages, mask, **options).objective

    result = rule(log_probs, old, advantages, mask, **options)
    assert np.isfinite(result.objective).all()
    assert difference_error(entries, result.derivative, log_probs, mask) < 1e-6
    per_token = result.objective.shape == mask.shape
    judged = (mask if per_token else mask.any(axis=1, keepdims=True)) & (advantages != 0)
    assert not (result.clipped & ~judged).any()
    has_band = options.get("clip_low", "the default") is not None
    assert result.clipped.any() == has_band
    assert (judged & ~result.clipped).any()
    for reduction in REDUCTIONS if per_token else REDUCTIONS[:-1]:
        if sigma < 1:
            assert (
                difference_error(
                    lambda varied, reduction=reduction: np.array([reduce(entries(varied), mask, reduction, 7.0)[0]]),
                    gradient(result, mask, reduction, 7.0),
                    log_probs,
                    mask,
                )
                < 1e-6
            )


LOG_HALF, LOG_1_1, LOG_1_5 = -0.6931471805599453, 0.0953101798043249, 0.4054651081081644  # ln 0.5, ln 1.1, ln 1.5

# the rule and its options, token log-ratios and advantage of one response; its objective, derivative (first entries), clipped
BY_HAND: list[tuple[Rule, list[float], float, dict[str, float | None], float, float, bool]] = [
    # 1. GRPO, r = 1.5, A = 2: min(3, 1.2 * 2) = 2.4, clipped.
    (grpo, [LOG_1_5], 2.0, {}, 2.4, 0.0, True),
    # 2. GRPO, r = 1.5, A = -2: min(-3, -2.4) = -3, flows with slope r A = -3.
    #    Dual clip at 1.3: max(-3, 1.3 * -2) = -2.6, clipped.
    (grpo, [LOG_1_5], -2.0, {}, -3.0, -3.0, False),
    (grpo, [LOG_1_5], -2.0, {"dual_clip": 1.3}, -2.6, 0.0, True),
    # 3. GSPO, log-ratios 1e-4 and 3e-4, A = 2: s = exp(2e-4) = 1.000200020001333, objective 2 s, slope 2 s / 2 = s.
    (gspo, [1e-4, 3e-4], 2.0, {}, 2.000400040002667, 1.000200020001333, False),
    # 4. RLOO, two tokens of ratio 1.1: w = 1.21 > 1.2 is clipped for A = 1 though each token is inside its band;
    # for A = -1 it flows with slope -1.21.
    (rloo, [LOG_1_1, LOG_1_1], 1.0, {}, 1.2, 0.0, True),
    (rloo, [LOG_1_1, LOG_1_1], -1.0, {}, -1.21, -1.21, False),
    # 5. FSPO, L = 4: band +-0.03 * 2 = +-0.06, ceiling 0.09 * 2 = 0.18. Four tokens of 0.02: S = 0.08 > 0.06, so
    #    A = 1 gives exp(0.06) = 1.0618365465453596, clipped; A = -1 gives -exp(0.08) = -1.0832870676749586, flows.
    #    Four of 0.05: S = 0.2 > 0.18, so A = -1 gives -exp(0.18) = -1.1972173631218102, clipped.
    #    Four of -0.02: S = -0.08 < -0.06, so A = -1 gives -exp(-0.06) = -0.9417645335842487, clipped.
    (fspo, [0.02] * 4, 1.0, {}, 1.0618365465453596, 0.0, True),
    (fspo, [0.02] * 4, -1.0, {}, -1.0832870676749586, -1.0832870676749586, False),
    (fspo, [0.05] * 4, -1.0, {}, -1.1972173631218102, 0.0, True),
    (fspo, [-0.02] * 4, -1.0, {}, -0.9417645335842487, 0.0, True),
    #    Drift -0.01: the band moves to [-0.1, 0.02], the ceiling to 0.14. S = 0.08 and A = 1 gives exp(0.02),
    #    S = 0.2 and A = -1 gives -exp(0.14), S = -0.2 and A = -1 gives -exp(-0.1), all clipped.
    (fspo, [0.02] * 4, 1.0, {"drift": -0.01}, 1.0202013400267558, 0.0, True),
    (fspo, [0.05] * 4, -1.0, {"drift": -0.01}, -1.1502737988572274, 0.0, True),
    (fspo, [-0.05] * 4, -1.0, {"drift": -0.01}, -0.9048374180359595, 0.0, True),
    # 6. The limit: GRPO, log-ratio 30, A = -1: -exp(20) = -485165195.4097903, no gradient, and not clipped.
    (grpo, [30.0], -1.0, {}, -485165195.4097903, 0.0, False),
    # 7. Edges one by one, ratios 1.5 or 0.5 (GSPO: log-ratio +-0.001), A = 1 against high, A = -1 against low.
    (grpo, [LOG_1_5], 1.0, {"clip_high": 0.28}, 1.28, 0.0, True),
    (grpo, [LOG_HALF], -1.0, {"clip_high": 0.28}, -0.8, 0.0, True),
    (gspo, [0.001, 0.001], 1.0, {}, 1.0004, 0.0, True),
    (gspo, [-0.001, -0.001], -1.0, {}, -0.9997, 0.0, True),
    (gspo, [0.001, 0.001], -1.0, {"dual_clip": 1.0005}, -1.0005, 0.0, True),
    (rloo, [LOG_1_5, LOG_1_5], 1.0, {"clip_high": 0.3}, 1.3, 0.0, True),
    (rloo, [LOG_HALF, LOG_HALF], -1.0, {"clip_low": 0.1}, -0.9, 0.0, True),
    (rloo, [LOG_1_5, LOG_1_5], -1.0, {"dual_clip": 2.0}, -2.0, 0.0, True),
    (rloo, [LOG_1_5, LOG_1_5], 1.0, {"clip_high": None}, 2.25, 2.25, False),
    (rloo, [LOG_HALF, LOG_HALF], -1.0, {"clip_low": None}, -0.25, -0.25, False),
]


@pytest.mark.parametrize(("rule", "log_ratios", "advantage", "options", "objective", "derivative", "clipped"), BY_HAND)
def test_a_response_worked_by_hand(
    rule: Rule,
    log_ratios: list[float],
    advantage: float,
    options: dict[str, float | None],
    objective: float,
    derivative: float,
    clipped: bool,
) -> None:
    old = np.full((1, len(log_ratios)), -1.0)
    result = rule(old + np.array([log_ratios]), old, np.array([[advantage]]), np.ones_like(old, dtype=bool), **options)
    assert result.objective[0, 0] == pytest.approx(objective, rel=1e-11)
    assert result.derivative[0, 0] == pytest.approx(derivative, rel=1e-11, abs=0)
    assert bool(result.clipped[0, 0]) is clipped


def test_advantages_worked_by_hand() -> None:
    # rewards 1 0 0 0: mean 1/4, sum of squares 3/4, std 1/2 with ddof 1; 0.75 / 0.500001 = 1.499997000006;
    # less the group's mean: 3/4 and -1/4; less the mean of the others: 1 and -1/3; equal rewards: 0
    rewards = np.array([1.0, 0.1, 0.0, 0.0, 0.1, 0.0, 0.1])
    groups = np.array([0, 1, 0, 0, 1, 0, 1])
    expected = [
        (group_norm, 1.499997000006, -0.499999000002),
        (group_mean, 0.75, -0.25),
        (leave_one_out, 1.0, -1.0 / 3.0),
    ]
    for estimator, first, other in expected:
        by_hand = np.array([[first], [0.0], [other], [other], [0.0], [other], [0.0]])
        np.testing.assert_allclose(estimator(rewards, groups), by_hand, rtol=0, atol=1e-11)


def test_reductions_worked_by_hand() -> None:
    # rows (1, 2), (6, masked) and (masked, masked): 3 tokens, 2 responses
    objective = np.array([[1.0, 2.0], [6.0, np.nan], [np.nan, np.nan]])
    mask = np.isfinite(objective)
    # (1.5 + 6) / 2; (3 + 6) / 2; 9 / (2 * 10); 9 / 3
    for reduction, value in zip(REDUCTIONS, (3.75, 4.5, 0.45, 3.0), strict=True):
        assert reduce(objective, mask, reduction, 10.0)[0] == pytest.approx(value, rel=1e-12)
    # a response each 1, 6 and an empty row: 7 / 2; 7 / 2; 7 / (2 * 10)
    for reduction, value in zip(REDUCTIONS[:-1], (3.5, 3.5, 0.35), strict=True):
        assert reduce(objective[:, :1], mask, reduction, 10.0)[0] == pytest.approx(value, rel=1e-12)
    # the rows of prompts 0, 0, 1, of which only the first has tokens; then 0, 1, 2: (3 / 2 + 6 / 1) / 2
    for groups, value in (((0, 0, 1), 3.0), ((0, 1, 2), 3.75)):
        assert reduce(objective, mask, "prompt_mean", groups=groups)[0] == pytest.approx(value, rel=1e-12)
    for reduction in ("token_mean", "prompt_mean"):
        with pytest.raises(ValueError, match=reduction):
            reduce(objective[:, :1], mask, reduction)
