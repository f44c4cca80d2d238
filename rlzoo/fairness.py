"""How evenly a clip treats response lengths: length bins, acceptance, length reweighting error, effective sample size."""

from __future__ import annotations

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


def bin_sums(index: Tensor, values: Tensor, num_bins: int = NUM_BINS) -> Tensor:
    """Sum of ``(n,)`` values in each bin, float64 ``(num_bins,)``; ``index`` from `bin_index`."""
    return torch.zeros(num_bins, dtype=torch.float64).index_add_(0, index, values.double())


def length_reweighting_error(count: Tensor, clipped: Tensor) -> tuple[Tensor, Tensor]:
    """Length reweighting error (arXiv 2509.09177) from sums by length bin.

    With shares p_k of the responses, acceptance a_k = 1 - clip fraction and weight w_k = a_k / sum(p_k a_k), the first is the
    largest |w_k - 1|, the second the sum of p_k |w_k - 1|. Both are 0 when nothing is clipped, and grow with what is: compare
    policies only at a matched overall clip fraction.

    Args:
        count: ``(..., K)`` responses with non-zero advantage in each bin; an empty bin counts for nothing.
        clipped: ``(..., K)`` sum of their clip decisions; for a token rule a response's is its share of clipped tokens.

    Returns:
        ``lre_max`` and ``lre_mean``, float64 ``(...)``; NaN where everything is clipped.

    Example:
        Half of the responses in each of two bins, a clip fraction of 0 in one and 0.5 in the other: acceptance 1 and 0.5,
        mean 0.75, so ``lre_max = max(|1/.75 - 1|, |.5/.75 - 1|) = 1/3``, and ``lre_mean = 1/3``.
    """
    accepted, count = count.double() - clipped.double(), count.double()
    mean = accepted.sum(-1, keepdim=True) / count.sum(-1, keepdim=True)
    error = torch.where(count > 0, (accepted / count / mean - 1).abs(), 0.0)
    share = count / count.sum(-1, keepdim=True)
    total = torch.where(mean[..., 0] > 0, 1.0, torch.nan)
    return error.amax(-1) * total, (share * error).sum(-1) * total


def effective_sample_size(weights: Tensor) -> float:
    """Kish's effective share ``(sum w)^2 / (n sum w^2)`` of n importance weights, between 0 and 1; 0 if all weights are 0."""
    square = float(weights.double().square().sum())
    return float(weights.double().sum()) ** 2 / (len(weights) * square) if square > 0 else 0.0
