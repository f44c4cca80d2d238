"""Measures how far recorded updates moved the log-probs of responses, by length and independently of any rule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlzoo.core import ops
from rlzoo.core.fairness import NUM_BINS, bin_edges, bin_index
from rlzoo.core.types import ClipInputs
from rlzoo.measure.profile import MOVED

FEWEST = 10
"""Minimum number of responses for a bin to be used in fitting the exponent."""


@dataclass(frozen=True, slots=True)
class Drift:
    """The drift of responses with a nonzero advantage that earlier updates moved. Tuples have one entry per length bin.

    S is a response's log-ratio to the old model, summed over its L tokens. If tokens moved independently, sd(S) would grow
    with sqrt(L), and ``sigma_root`` would be equal in all bins. If all tokens moved together, ``sigma_mean`` would be equal
    in all bins.
    """

    edges: tuple[float, ...]  # (K + 1,) tokens
    count: tuple[int, ...]
    negative: tuple[float, ...]  # share of responses with A < 0
    mean: tuple[float, ...]  # mean of S, in nats
    sigma: tuple[float, ...]  # standard deviation of S, in nats
    sigma_root: tuple[float, ...]  # standard deviation of S / sqrt(L)
    sigma_mean: tuple[float, ...]  # standard deviation of S / L
    mismatch: tuple[float, ...]  # standard deviation of the summed log-ratio of the old model to the sampler; NaN if unknown
    exponent: float  # slope of log sd(S) against log L over bins with at least `FEWEST` responses; NaN without two bins
    moved: float  # among the responses with a nonzero advantage, the share that earlier optimizer steps had moved

    @classmethod
    def of(cls, updates: Iterable[ClipInputs]) -> Drift | None:
        """Compute the drift over all updates, or return None if no response with a nonzero advantage has moved.

        Args:
            updates: inputs of each update, with the log-probs before its optimizer step.
        """
        columns = [torch.cat(column) for column in zip(*map(_rows, updates), strict=True)]
        if not columns:
            return None
        length, total, negative, mismatch, has_moved = columns
        if not bool(has_moved.any()):
            return None
        share, edges = float(has_moved.double().mean()), bin_edges(length)  # the bins of the other tables
        length, total, negative, mismatch = (column[has_moved] for column in (length, total, negative, mismatch))
        picked = [bin_index(length, edges) == k for k in range(NUM_BINS)]

        def spread(values: Tensor) -> tuple[float, ...]:
            return tuple(float(values[rows].std()) if int(rows.sum()) > 1 else math.nan for rows in picked)

        def mean(values: Tensor) -> tuple[float, ...]:
            return tuple(float(values[rows].double().mean()) for rows in picked)

        sigma = spread(total)
        bins = list(zip(picked, sigma, strict=True))
        return cls(
            edges=tuple(edges.tolist()),
            count=tuple(int(rows.sum()) for rows in picked),
            negative=mean(negative),
            mean=mean(total),
            sigma=sigma,
            sigma_root=spread(total / length.sqrt()),
            sigma_mean=spread(total / length),
            mismatch=spread(mismatch),
            exponent=_slope([(float(length[rows].mean()), sd) for rows, sd in bins if int(rows.sum()) >= FEWEST]),
            moved=share,
        )


def _rows(inputs: ClipInputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return ``(n,)`` columns for responses with A != 0: length, S, whether A < 0, mismatch, and whether S moved."""
    mask = inputs.response_mask
    log_ratio = torch.where(mask, inputs.log_probs - inputs.old_log_probs, 0.0).double()
    sampled = inputs.rollout_log_probs
    mismatch = torch.full(mask.shape, math.nan) if sampled is None else torch.where(mask, inputs.old_log_probs - sampled, 0.0)
    length = mask.sum(-1).double()
    advantage = ops.per_response(inputs.advantages.expand(mask.shape), mask).squeeze(-1)
    judged = torch.where(mask, inputs.advantages, 0.0).ne(0).any(-1)
    moved = log_ratio.square().sum(-1) > MOVED**2 * length
    columns = (length, log_ratio.sum(-1), advantage < 0, mismatch.double().sum(-1), moved)
    length, total, negative, mismatch, moved = (column[judged] for column in columns)
    return length, total, negative, mismatch, moved


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Fit the least-squares slope of log sigma against log length, or return NaN for fewer than two lengths."""
    pairs = [(math.log(length), math.log(sigma)) for length, sigma in points if sigma > 0]
    if len({x for x, _ in pairs}) < 2:
        return math.nan
    x, y = (np.array(column) for column in zip(*pairs, strict=True))
    return float(np.polyfit(x, y, deg=1)[0])
