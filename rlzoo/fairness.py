"""How evenly a clip treats response lengths: length bins, acceptance, length reweighting error, effective sample size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_BINS = 6


def bin_edges(lengths: Tensor, num_bins: int = NUM_BINS) -> Tensor:
    """Quantiles of length that cut responses into bins of about equal size.

    Args:
        lengths: ``(n,)`` response lengths in tokens, n > 0.
        num_bins: how many bins.

    Returns:
        float32 ``(num_bins + 1,)``, ascending, from the shortest to the longest length.
    """
    return torch.quantile(lengths.float(), torch.linspace(0, 1, num_bins + 1, device=lengths.device))


def bin_index(lengths: Tensor, edges: Tensor) -> Tensor:
    """The bin of each length, ``(n,)`` integers: bin k holds ``edges[k] < length <= edges[k + 1]``, bin 0 its floor too."""
    return torch.bucketize(lengths.float().contiguous(), edges[1:-1].contiguous(), right=False)


@dataclass(frozen=True, slots=True)
class ClipByLength:
    """Clip fraction per length bin, and what it does to the mix of lengths that is learned from.

    Example:
        Half of the responses in each of two bins, a clip fraction of 0 in one and 0.5 in the other: acceptance 1 and 0.5,
        mean 0.75, so ``lre_max = max(|1/.75 - 1|, |.5/.75 - 1|) = 1/3`` and ``lre_mean = 1/3``.
    """

    edges: Tensor  # (K + 1,) lengths in tokens
    count: Tensor  # (K,) responses
    fraction: Tensor  # (K,) clip fraction; NaN for an empty bin
    lre_max: float | None  # None when everything is clipped
    lre_mean: float | None


def clip_by_length(lengths: Tensor, clipped: Tensor, num_bins: int = NUM_BINS) -> ClipByLength:
    """Clip fraction by length bin and the length reweighting error (arXiv 2509.09177).

    With shares p_k of the responses, acceptance a_k = 1 - clip fraction and weight w_k = a_k / sum(p_k a_k), ``lre_max`` is
    the largest |w_k - 1| and ``lre_mean`` the sum of p_k |w_k - 1|. Both are 0 when nothing is clipped: compare policies only
    at a matched overall clip fraction.

    Args:
        lengths: ``(n,)`` lengths of the responses with non-zero advantage, n > 0.
        clipped: ``(n,)`` 1 where clipped; for a token rule the share of the response's tokens that is.
        num_bins: quantile bins.
    """
    edges = bin_edges(lengths, num_bins)
    index = bin_index(lengths, edges)
    count = torch.zeros(num_bins, dtype=torch.float64).index_add_(0, index, torch.ones(len(index), dtype=torch.float64))
    total = torch.zeros(num_bins, dtype=torch.float64).index_add_(0, index, clipped.double())
    fraction = total / count
    share, accepted = count / count.sum(), 1 - fraction.nan_to_num(1.0)
    mean = 1 - float(clipped.double().mean())
    if mean <= 0:
        return ClipByLength(edges, count, fraction, None, None)
    error = (accepted / mean - 1).abs()[count > 0]
    return ClipByLength(edges, count, fraction, float(error.max()), float((share[count > 0] * error).sum()))


def effective_sample_size(weights: Tensor) -> float:
    """Kish's effective share ``(sum w)^2 / (n sum w^2)`` of n importance weights, between 0 and 1; 0 if all weights are 0."""
    square = float(weights.double().square().sum())
    return float(weights.double().sum()) ** 2 / (len(weights) * square) if square > 0 else 0.0
