"""Float64 NumPy oracle of four clipping rules, written from the textbook formulas with explicit loops.

Nothing here is shared with the package under test. Each rule evaluates min(r A, clip(r, lo, hi) A), and for a negative
advantage max(that, c A), on ratios and not on log-ratios. Masked positions are never read, so they may hold NaN or inf.
Run the file to check the derivatives against central finite differences and a few numbers worked by hand.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
Reduction = Literal["token_mean", "sequence_mean", "sequence_mean_token_sum", "constant_length"]

LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class OracleResult:
    """One rule's answer; `derivative` is d(objective.sum()) / d(log_probs), always (B, T), 0 where masked."""

    objective: FloatArray
    derivative: FloatArray
    clipped: BoolArray


def _exp(value: float) -> float:
    """Exponential that overflows to inf instead of raising."""
    return math.exp(value) if value < 709.0 else math.inf


def _surrogate(log_ratio: float, advantage: float, low: float, high: float, cap: float | None) -> tuple[float, float, bool]:
    """Textbook surrogate of one ratio: its value, its derivative in the log-ratio, and whether the band cut it."""
    ratio = math.exp(min(max(log_ratio, -LOG_RATIO_LIMIT), LOG_RATIO_LIMIT))
    unclipped = ratio * advantage
    clipped = min(max(ratio, low), high) * advantage
    value = min(unclipped, clipped)
    cut = clipped < unclipped
    if advantage < 0 and cap is not None and cap * advantage > value:
        value = cap * advantage
        cut = True
    flows = not cut and abs(log_ratio) <= LOG_RATIO_LIMIT
    # d(r A)/d(log r) = r A
    return value, unclipped if flows else 0.0, cut


def _tokens(mask: BoolArray, row: int) -> list[int]:
    """Positions of the response tokens of one row."""
    return [t for t in range(mask.shape[1]) if mask[row, t]]


def _log_ratios(log_probs: FloatArray, old_log_probs: FloatArray, row: int, tokens: list[int]) -> list[float]:
    """Log-ratios of one row's response tokens, in float64."""
    return [float(log_probs[row, t]) - float(old_log_probs[row, t]) for t in tokens]


def _check_column(advantages: FloatArray, rows: int) -> None:
    """Refuse advantages that are not one per response."""
    if advantages.shape != (rows, 1):
        raise ValueError(f"advantages must be ({rows}, 1), got {advantages.shape}")


def grpo(
    log_probs: FloatArray,
    old_log_probs: FloatArray,
    advantages: FloatArray,
    mask: BoolArray,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> OracleResult:
    """GRPO / PPO: one ratio per token, objective (B, T); advantages (B, 1) or (B, T)."""
    rows, columns = mask.shape
    objective = np.zeros((rows, columns))
    derivative = np.zeros((rows, columns))
    clipped = np.zeros((rows, columns), dtype=bool)
    for b in range(rows):
        tokens = _tokens(mask, b)
        log_ratios = _log_ratios(log_probs, old_log_probs, b, tokens)
        for t, log_ratio in zip(tokens, log_ratios, strict=True):
            advantage = float(advantages[b, 0] if advantages.shape[1] == 1 else advantages[b, t])
            objective[b, t], derivative[b, t], clipped[b, t] = _surrogate(
                log_ratio, advantage, 1.0 - clip_low, 1.0 + clip_high, dual_clip
            )
    return OracleResult(objective, derivative, clipped)


def gspo(
    log_probs: FloatArray,
    old_log_probs: FloatArray,
    advantages: FloatArray,
    mask: BoolArray,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    dual_clip: float | None = None,
) -> OracleResult:
    """GSPO: the ratio is exp of the mean token log-ratio, objective (B, 1)."""
    rows, columns = mask.shape
    _check_column(advantages, rows)
    objective = np.zeros((rows, 1))
    derivative = np.zeros((rows, columns))
    clipped = np.zeros((rows, 1), dtype=bool)
    for b in range(rows):
        tokens = _tokens(mask, b)
        if not tokens:
            continue
        mean = math.fsum(_log_ratios(log_probs, old_log_probs, b, tokens)) / len(tokens)
        objective[b, 0], slope, clipped[b, 0] = _surrogate(
            mean, float(advantages[b, 0]), 1.0 - clip_low, 1.0 + clip_high, dual_clip
        )
        for t in tokens:
            derivative[b, t] = slope / len(tokens)
    return OracleResult(objective, derivative, clipped)


def rloo(
    log_probs: FloatArray,
    old_log_probs: FloatArray,
    advantages: FloatArray,
    mask: BoolArray,
    *,
    clip_low: float | None = 0.2,
    clip_high: float | None = 0.2,
    dual_clip: float | None = None,
) -> OracleResult:
    """RLOO as the FSPO paper's baseline: the ratio is exp of the summed log-ratio, objective (B, 1); None = no edge."""
    rows, columns = mask.shape
    _check_column(advantages, rows)
    low = 0.0 if clip_low is None else 1.0 - clip_low
    high = math.inf if clip_high is None else 1.0 + clip_high
    objective = np.zeros((rows, 1))
    derivative = np.zeros((rows, columns))
    clipped = np.zeros((rows, 1), dtype=bool)
    for b in range(rows):
        tokens = _tokens(mask, b)
        if not tokens:
            continue
        total = math.fsum(_log_ratios(log_probs, old_log_probs, b, tokens))
        objective[b, 0], slope, clipped[b, 0] = _surrogate(total, float(advantages[b, 0]), low, high, dual_clip)
        for t in tokens:
            derivative[b, t] = slope
    return OracleResult(objective, derivative, clipped)


def fspo(
    log_probs: FloatArray,
    old_log_probs: FloatArray,
    advantages: FloatArray,
    mask: BoolArray,
    *,
    width_low: float = 0.03,
    width_high: float = 0.03,
    drift: float = 0.0,
    width_ceiling: float | None = 0.09,
) -> OracleResult:
    """FSPO: the ratio is exp of the summed log-ratio, its band grows with sqrt(L), objective (B, 1)."""
    rows, columns = mask.shape
    _check_column(advantages, rows)
    objective = np.zeros((rows, 1))
    derivative = np.zeros((rows, columns))
    clipped = np.zeros((rows, 1), dtype=bool)
    for b in range(rows):
        tokens = _tokens(mask, b)
        if not tokens:
            continue
        length = len(tokens)
        total = math.fsum(_log_ratios(log_probs, old_log_probs, b, tokens))
        low = _exp(drift * length - width_low * math.sqrt(length))
        high = _exp(drift * length + width_high * math.sqrt(length))
        cap = None if width_ceiling is None else _exp(drift * length + width_ceiling * math.sqrt(length))
        objective[b, 0], slope, clipped[b, 0] = _surrogate(total, float(advantages[b, 0]), low, high, cap)
        for t in tokens:
            derivative[b, t] = slope
    return OracleResult(objective, derivative, clipped)


def reduce(
    objective: FloatArray, mask: BoolArray, reduction: Reduction, constant: float | None = None
) -> tuple[float, FloatArray]:
    """Reduce an objective to a scalar; also the weights, so that value = sum(weights * objective) on response tokens.

    Rows without response tokens have weight 0 and are not counted as responses. An objective of the mask's shape is
    per token, a (B, 1) one with T > 1 is per response.
    """
    rows, columns = mask.shape
    if objective.shape not in {(rows, columns), (rows, 1)}:
        raise ValueError(f"objective {objective.shape} does not fit the mask {mask.shape}")
    per_response = objective.shape != mask.shape
    if reduction == "token_mean" and per_response:
        raise ValueError("token_mean needs a (B, T) objective")
    if reduction == "constant_length" and (constant is None or constant <= 0):
        raise ValueError("constant_length needs a positive constant")
    lengths = [len(_tokens(mask, b)) for b in range(rows)]
    responses = sum(1 for length in lengths if length > 0)
    weights = np.zeros(objective.shape)
    value = 0.0
    for b in range(rows):
        if lengths[b] == 0:
            continue
        if reduction == "token_mean":
            weight = 1.0 / sum(lengths)
        elif reduction == "sequence_mean":
            weight = 1.0 / responses if per_response else 1.0 / (responses * lengths[b])
        elif reduction == "sequence_mean_token_sum":
            weight = 1.0 / responses
        elif reduction == "constant_length":
            weight = 1.0 / (responses * float(constant))
        else:
            raise ValueError(f"unknown reduction {reduction!r}")
        for t in [0] if per_response else _tokens(mask, b):
            weights[b, t] = weight
            value += weight * float(objective[b, t])
    return value, weights


def gradient(result: OracleResult, mask: BoolArray, reduction: Reduction, constant: float | None = None) -> FloatArray:
    """Differentiate the reduced objective in log_probs, (B, T)."""
    _, weights = reduce(result.objective, mask, reduction, constant)
    composed = np.zeros(mask.shape)
    for b in range(mask.shape[0]):
        for t in _tokens(mask, b):
            weight = weights[b, 0] if weights.shape[1] == 1 else weights[b, t]
            composed[b, t] = weight * result.derivative[b, t]
    return composed


def _members(group_ids: NDArray[np.int_], row: int) -> list[int]:
    """Rows of the same group as `row`, itself included."""
    return [i for i in range(len(group_ids)) if group_ids[i] == group_ids[row]]


def group_norm(rewards: FloatArray, group_ids: NDArray[np.int_], ddof: int = 1) -> FloatArray:
    """(R - mean) / (std + 1e-6) in the group, (B, 1); a group of equal rewards (or of one) gets 0."""
    advantages = np.zeros((len(rewards), 1))
    for b in range(len(rewards)):
        values = [float(rewards[i]) for i in _members(group_ids, b)]
        if min(values) == max(values):
            continue
        mean = math.fsum(values) / len(values)
        std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - ddof))
        advantages[b, 0] = (float(rewards[b]) - mean) / (std + 1e-6)
    return advantages


def group_mean(rewards: FloatArray, group_ids: NDArray[np.int_]) -> FloatArray:
    """R - mean of the group, (B, 1)."""
    advantages = np.zeros((len(rewards), 1))
    for b in range(len(rewards)):
        values = [float(rewards[i]) for i in _members(group_ids, b)]
        advantages[b, 0] = float(rewards[b]) - math.fsum(values) / len(values)
    return advantages


def leave_one_out(rewards: FloatArray, group_ids: NDArray[np.int_]) -> FloatArray:
    """R - mean of the other members of the group, (B, 1); a group of one gets 0."""
    advantages = np.zeros((len(rewards), 1))
    for b in range(len(rewards)):
        others = [float(rewards[i]) for i in _members(group_ids, b) if i != b]
        if others:
            advantages[b, 0] = float(rewards[b]) - math.fsum(others) / len(others)
    return advantages


def overlong_penalty(length: int, max_length: int, buffer_share: float, penalty: float) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13) times a penalty, as what is added to the reward."""
    buffer = buffer_share * max_length
    if length <= max_length - buffer:
        return 0.0
    if length <= max_length:
        return penalty * ((max_length - buffer) - length) / buffer
    return -penalty


def kl_returns(rewards: FloatArray, token_kl: FloatArray, mask: BoolArray, kl_coef: float) -> FloatArray:
    """REINFORCE++'s return of every token, R - kl_coef * the KL of the tokens from it to the end, (B, T)."""
    returns = np.zeros(mask.shape)
    for b in range(mask.shape[0]):
        tokens = _tokens(mask, b)
        for place, t in enumerate(tokens):
            returns[b, t] = float(rewards[b]) - kl_coef * math.fsum(float(token_kl[b, i]) for i in tokens[place:])
    return returns


def token_norm(returns: FloatArray, mask: BoolArray) -> FloatArray:
    """(return - mean) / (std + 1e-6) over all response tokens of the batch, std with n - 1, (B, T)."""
    places = [(b, t) for b in range(mask.shape[0]) for t in _tokens(mask, b)]
    values = [float(returns[place]) for place in places]
    mean = math.fsum(values) / len(values)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
    advantages = np.zeros(mask.shape)
    for place, value in zip(places, values, strict=True):
        advantages[place] = (value - mean) / (std + 1e-6)
    return advantages


# --- self-check ------------------------------------------------------------------------------------------------------

Rule = Callable[..., OracleResult]
Options = dict[str, float | None]


def _random_batch(seed: int, sigma: float) -> tuple[FloatArray, FloatArray, FloatArray, BoolArray]:
    """Off-policy data of ragged length, with NaN or inf where masked, one empty row and some rows of A = 0."""
    rng = np.random.default_rng(seed)
    rows, columns = 32, 9
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


def _difference_error(
    values: Callable[[FloatArray], FloatArray], derivative: FloatArray, log_probs: FloatArray, mask: BoolArray
) -> tuple[float, int]:
    """Largest error of `derivative` against central differences, relative above 1; and the entries skipped at a kink.

    A kink is seen from the values alone: the one-sided differences disagree. `values` are summed after the difference
    is taken, so that a huge entry that did not move costs no digits.
    """
    step = 1e-6
    worst, skipped = 0.0, 0
    here = values(log_probs)
    for b in range(mask.shape[0]):
        for t in _tokens(mask, b):
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
    if not (derivative[~mask] == 0).all():
        worst = math.inf
    return worst, skipped


def _check_case(seed: int, rule: Rule, sigma: float, options: Options) -> float:
    """Compare one rule, and its reductions where ratios are moderate, with finite differences; print the errors."""
    log_probs, old, advantages, mask = _random_batch(seed, sigma)
    result = rule(log_probs, old, advantages, mask, **options)
    per_token = result.objective.shape == mask.shape
    judged = mask if per_token else mask.any(axis=1, keepdims=True)
    positive, negative = judged & (advantages > 0), judged & (advantages < 0)
    if not np.isfinite(result.objective).all() or (result.clipped & ~positive & ~negative).any():
        raise AssertionError(f"{rule.__name__}: a non-finite objective, or clipped where A == 0 or masked")

    def entries(varied: FloatArray) -> FloatArray:
        return rule(varied, old, advantages, mask, **options).objective

    def reduced_error(reduction: Reduction) -> float:
        def value(varied: FloatArray) -> FloatArray:
            return np.array([reduce(entries(varied), mask, reduction, 7.0)[0]])

        return _difference_error(value, gradient(result, mask, reduction, 7.0), log_probs, mask)[0]

    error, skipped = _difference_error(entries, result.derivative, log_probs, mask)
    reductions: list[Reduction] = ["sequence_mean", "sequence_mean_token_sum", "constant_length"]
    if per_token:
        reductions.append("token_mean")
    worst_reduced = max(reduced_error(reduction) for reduction in reductions) if sigma < 1 else 0.0
    print(
        f"{rule.__name__} sigma={sigma:g} {options}: error {error:.1e}, reduced {worst_reduced:.1e}, "
        f"skipped {skipped}/{mask.sum()}, clipped A>0 {(result.clipped & positive).sum()}/{positive.sum()}, "
        f"A<0 {(result.clipped & negative).sum()}/{negative.sum()}"
    )
    return max(error, worst_reduced)


def _check_differences() -> float:
    """Compare every rule and option with finite differences, inside and beyond the +-20 limit."""
    cases: list[tuple[Rule, float, Options]] = [
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
    ]
    return max(_check_case(seed, *case) for seed, case in enumerate(cases))


def _one_row(log_ratios: list[float], advantage: float) -> tuple[FloatArray, FloatArray, FloatArray, BoolArray]:
    """Build a batch of one unmasked response with these token log-ratios."""
    old = np.full((1, len(log_ratios)), -1.0)
    return old + np.array([log_ratios]), old, np.array([[advantage]]), np.ones((1, len(log_ratios)), dtype=bool)


def _check_by_hand() -> float:
    """Compare with numbers worked by hand; the literals below come from the comments, not from this file's code."""
    log05, log11, log15 = -0.6931471805599453, 0.0953101798043249, 0.4054651081081644  # ln 0.5, ln 1.1, ln 1.5
    # (result, objective of the first entry, derivative of the first entry, clipped)
    cases: list[tuple[OracleResult, float, float, bool]] = [
        # 1. GRPO, r = 1.5, A = 2: min(3, 1.2 * 2) = 2.4, clipped.
        (grpo(*_one_row([log15], 2.0)), 2.4, 0.0, True),
        # 2. GRPO, r = 1.5, A = -2: min(-3, -2.4) = -3, flows with slope r A = -3.
        #    Dual clip at 1.3: max(-3, 1.3 * -2) = -2.6, clipped.
        (grpo(*_one_row([log15], -2.0)), -3.0, -3.0, False),
        (grpo(*_one_row([log15], -2.0), dual_clip=1.3), -2.6, 0.0, True),
        # 3. GSPO, log-ratios 1e-4 and 3e-4, A = 2: s = exp(2e-4) = 1.000200020001333, objective 2 s, slope 2 s / 2 = s.
        (gspo(*_one_row([1e-4, 3e-4], 2.0)), 2.000400040002667, 1.000200020001333, False),
        # 4. RLOO, two tokens of ratio 1.1: w = 1.21 > 1.2 is clipped for A = 1 though each token is inside its band;
        #    for A = -1 it flows with slope -1.21.
        (rloo(*_one_row([log11, log11], 1.0)), 1.2, 0.0, True),
        (rloo(*_one_row([log11, log11], -1.0)), -1.21, -1.21, False),
        # 5. FSPO, L = 4: band +-0.03 * 2 = +-0.06, ceiling 0.09 * 2 = 0.18. Four tokens of 0.02: S = 0.08 > 0.06, so
        #    A = 1 gives exp(0.06) = 1.0618365465453596, clipped; A = -1 gives -exp(0.08) = -1.0832870676749586, flows.
        #    Four of 0.05: S = 0.2 > 0.18, so A = -1 gives -exp(0.18) = -1.1972173631218102, clipped.
        #    Four of -0.02: S = -0.08 < -0.06, so A = -1 gives -exp(-0.06) = -0.9417645335842487, clipped.
        (fspo(*_one_row([0.02] * 4, 1.0)), 1.0618365465453596, 0.0, True),
        (fspo(*_one_row([0.02] * 4, -1.0)), -1.0832870676749586, -1.0832870676749586, False),
        (fspo(*_one_row([0.05] * 4, -1.0)), -1.1972173631218102, 0.0, True),
        (fspo(*_one_row([-0.02] * 4, -1.0)), -0.9417645335842487, 0.0, True),
        #    Drift -0.01: the band moves to [-0.1, 0.02], the ceiling to 0.14. S = 0.08 and A = 1 gives exp(0.02),
        #    S = 0.2 and A = -1 gives -exp(0.14), S = -0.2 and A = -1 gives -exp(-0.1), all clipped.
        (fspo(*_one_row([0.02] * 4, 1.0), drift=-0.01), 1.0202013400267558, 0.0, True),
        (fspo(*_one_row([0.05] * 4, -1.0), drift=-0.01), -1.1502737988572274, 0.0, True),
        (fspo(*_one_row([-0.05] * 4, -1.0), drift=-0.01), -0.9048374180359595, 0.0, True),
        # 6. The limit: GRPO, log-ratio 30, A = -1: -exp(20) = -485165195.4097903, no gradient, and not clipped.
        (grpo(*_one_row([30.0], -1.0)), -485165195.4097903, 0.0, False),
        # 7. Edges one by one, ratios 1.5 or 0.5 (GSPO: log-ratio +-0.001), A = 1 against high, A = -1 against low.
        (grpo(*_one_row([log15], 1.0), clip_high=0.28), 1.28, 0.0, True),
        (grpo(*_one_row([log05], -1.0), clip_high=0.28), -0.8, 0.0, True),
        (gspo(*_one_row([0.001, 0.001], 1.0)), 1.0004, 0.0, True),
        (gspo(*_one_row([-0.001, -0.001], -1.0)), -0.9997, 0.0, True),
        (gspo(*_one_row([0.001, 0.001], -1.0), dual_clip=1.0005), -1.0005, 0.0, True),
        (rloo(*_one_row([log15, log15], 1.0), clip_high=0.3), 1.3, 0.0, True),
        (rloo(*_one_row([log05, log05], -1.0), clip_low=0.1), -0.9, 0.0, True),
        (rloo(*_one_row([log15, log15], -1.0), dual_clip=2.0), -2.0, 0.0, True),
        (rloo(*_one_row([log15, log15], 1.0), clip_high=None), 2.25, 2.25, False),
        (rloo(*_one_row([log05, log05], -1.0), clip_low=None), -0.25, -0.25, False),
    ]
    largest = 0.0
    for result, objective, derivative, clipped in cases:
        if bool(result.clipped[0, 0]) is not clipped:
            raise AssertionError(f"clipped should be {clipped}: {result}")
        largest = max(largest, abs(result.objective[0, 0] - objective) / max(1.0, abs(objective)))
        largest = max(largest, abs(result.derivative[0, 0] - derivative))
    # 8. Rewards 1 0 0 0: mean 1/4, sum of squares 3/4, std 1/2 with ddof 1; 0.75 / 0.500001 = 1.499997000006.
    #    Minus the group's mean: 3/4 and -1/4. Minus the mean of the others: 1 and -1/3. Equal rewards: 0.
    rewards = np.array([1.0, 0.1, 0.0, 0.0, 0.1, 0.0, 0.1])
    groups = np.array([0, 1, 0, 0, 1, 0, 1])
    for advantages, first, other in [
        (group_norm(rewards, groups), 1.499997000006, -0.499999000002),
        (group_mean(rewards, groups), 0.75, -0.25),
        (leave_one_out(rewards, groups), 1.0, -1.0 / 3.0),
    ]:
        expected = np.array([[first], [0.0], [other], [other], [0.0], [other], [0.0]])
        largest = max(largest, float(np.abs(advantages - expected).max()))
    # 9. Objective rows (1, 2), (6, masked) and (masked, masked): 3 tokens, 2 responses.
    objective = np.array([[1.0, 2.0], [6.0, np.nan], [np.nan, np.nan]])
    mask = np.isfinite(objective)
    # 9 / 3; (1.5 + 6) / 2; (3 + 6) / 2; 9 / (2 * 10)
    for reduction, value in [
        ("token_mean", 3.0),
        ("sequence_mean", 3.75),
        ("sequence_mean_token_sum", 4.5),
        ("constant_length", 0.45),
    ]:
        largest = max(largest, abs(reduce(objective, mask, reduction, 10.0)[0] - value))
    # Per response 1, 6 and an empty row: 7 / 2; 7 / 2; 7 / (2 * 10).
    column = objective[:, :1]
    for reduction, value in [("sequence_mean", 3.5), ("sequence_mean_token_sum", 3.5), ("constant_length", 0.35)]:
        largest = max(largest, abs(reduce(column, mask, reduction, 10.0)[0] - value))
    try:
        reduce(column, mask, "token_mean")
    except ValueError:
        return largest
    raise AssertionError("token_mean must refuse a (B, 1) objective")


if __name__ == "__main__":
    by_differences = _check_differences()
    by_hand = _check_by_hand()
    print(f"max error against finite differences {by_differences:.2e}, against numbers worked by hand {by_hand:.2e}")
    if by_differences > 1e-6 or by_hand > 1e-11:
        raise SystemExit(1)
