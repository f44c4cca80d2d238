"""Float64 NumPy oracle of four clipping rules, written from the textbook formulas with explicit loops.

It shares no code with the package under test. Each rule evaluates min(r A, clip(r, lo, hi) A), and for a negative advantage
max(that, c A), on ratios and not on log-ratios. Masked positions are never read, so they may contain NaN or inf. The oracle
itself is tested in test_oracle.py, with central finite differences and numbers worked by hand.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
Reduction = Literal["token_mean", "prompt_mean", "sequence_mean", "sequence_mean_token_sum", "constant_length"]

LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class OracleResult:
    """One rule's result; `derivative` is d(objective.sum()) / d(log_probs), always (B, T), 0 where masked."""

    objective: FloatArray
    derivative: FloatArray
    clipped: BoolArray


def _exp(value: float) -> float:
    """Exponential that overflows to inf instead of raising."""
    return math.exp(value) if value < 709.0 else math.inf


def _surrogate(log_ratio: float, advantage: float, low: float, high: float, cap: float | None) -> tuple[float, float, bool]:
    """Return the textbook surrogate of one ratio: its value, its derivative in the log-ratio, and whether the band cut it."""
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
    """Return positions of the response tokens of one row."""
    return [t for t in range(mask.shape[1]) if mask[row, t]]


def _log_ratios(log_probs: FloatArray, old_log_probs: FloatArray, row: int, tokens: list[int]) -> list[float]:
    """Return log-ratios of one row's response tokens, in float64."""
    return [float(log_probs[row, t]) - float(old_log_probs[row, t]) for t in tokens]


def _check_column(advantages: FloatArray, rows: int) -> None:
    """Reject advantages that are not one per response."""
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
    objective: FloatArray,
    mask: BoolArray,
    reduction: Reduction,
    constant: float | None = None,
    groups: Sequence[int] = (),
) -> tuple[float, FloatArray]:
    """Reduce an objective to a scalar; also returns the weights, so that value = sum(weights * objective) on response tokens.

    Rows without response tokens have weight 0 and are not counted as responses. An objective with the mask's shape is per
    token; a (B, 1) objective with T > 1 is per response.
    """
    rows, columns = mask.shape
    if objective.shape not in {(rows, columns), (rows, 1)}:
        raise ValueError(f"objective {objective.shape} does not fit the mask {mask.shape}")
    per_response = objective.shape != mask.shape
    if reduction in ("token_mean", "prompt_mean") and per_response:
        raise ValueError(f"{reduction} needs a (B, T) objective")
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
        elif reduction == "prompt_mean":
            prompts = {groups[i] for i in range(rows) if lengths[i] > 0}
            weight = 1.0 / (len(prompts) * sum(lengths[i] for i in range(rows) if groups[i] == groups[b]))
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


def gradient(
    result: OracleResult,
    mask: BoolArray,
    reduction: Reduction,
    constant: float | None = None,
    groups: Sequence[int] = (),
) -> FloatArray:
    """Differentiate the reduced objective in log_probs, (B, T)."""
    _, weights = reduce(result.objective, mask, reduction, constant, groups)
    composed = np.zeros(mask.shape)
    for b in range(mask.shape[0]):
        for t in _tokens(mask, b):
            weight = weights[b, 0] if weights.shape[1] == 1 else weights[b, t]
            composed[b, t] = weight * result.derivative[b, t]
    return composed


def _members(group_ids: NDArray[np.int_], row: int) -> list[int]:
    """Return the rows of the same group as `row`, including itself."""
    return [i for i in range(len(group_ids)) if group_ids[i] == group_ids[row]]


def gdpo(parts: dict[str, FloatArray], weights: dict[str, float], group_ids: NDArray[np.int_]) -> FloatArray:
    """Weighted sum of the rewards normalised in their groups, minus its mean and over its std in the batch, (B, 1)."""
    total = [0.0] * len(group_ids)
    for name, values in parts.items():
        normalised = group_norm(values, group_ids)
        total = [total[b] + weights.get(name, 1.0) * float(normalised[b, 0]) for b in range(len(group_ids))]
    mean = math.fsum(total) / len(total)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in total) / (len(total) - 1))
    return np.array([[(value - mean) / (std + 1e-6)] for value in total])


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
    """Return DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13) times a penalty, as a term of the reward."""
    buffer = buffer_share * max_length
    if length <= max_length - buffer:
        return 0.0
    if length <= max_length:
        return penalty * ((max_length - buffer) - length) / buffer
    return -penalty


def kl_returns(rewards: FloatArray, token_kl: FloatArray, mask: BoolArray, kl_coef: float) -> FloatArray:
    """Return REINFORCE++'s return of every token, R - kl_coef * the KL of the tokens from it to the end, (B, T)."""
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
