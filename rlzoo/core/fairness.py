"""Measures how evenly clipping treats response lengths: acceptance by length bin, and the weights of the bins."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_BINS = 6


def bin_edges(lengths: Tensor, num_bins: int = NUM_BINS) -> Tensor:
    """Return the length quantiles that split responses into bins of about equal size.

    Args:
        lengths: ``(n,)`` response lengths in tokens, n > 0.
        num_bins: number of bins.

    Returns:
        float32 ``(num_bins + 1,)``, ascending, from the shortest to the longest length.
    """
    return torch.quantile(lengths.float(), torch.linspace(0, 1, num_bins + 1, device=lengths.device))


def bin_index(lengths: Tensor, edges: Tensor) -> Tensor:
    """Return the bin of each length, ``(n,)``.

    Bin k contains the lengths with ``edges[k] < length <= edges[k + 1]``. Bin 0 also contains its lower edge.
    """
    return torch.bucketize(lengths.float().contiguous(), edges[1:-1].contiguous(), right=False)


def bin_sums(index: Tensor, values: Tensor, num_bins: int = NUM_BINS) -> Tensor:
    """Return the sum of the ``(n,)`` values in each bin as float64 ``(num_bins,)``, given ``index`` from `bin_index`."""
    return torch.zeros(num_bins, dtype=torch.float64).index_add_(0, index, values.double())


@dataclass(frozen=True, slots=True)
class LengthWeights:
    """Weights of the length bins after clipping, relative to the bins' shares of the responses, as float64 ``(..., K)``.

    A weight of 0.8 means that clipping reduces a bin's share of the responses by 20%. Responses are grouped
    by bin k and advantage sign s: n_ks is their number, and a_ks is their acceptance rate, the share that was not clipped.
    p_k is the share of responses in bin k, and p_s is the share with sign s. a_s is the acceptance rate for sign s over all
    lengths, and a is the overall acceptance rate.

    - ``total``: w_k = sum_s (n_ks / n_k) a_ks / a. This is the observed weight.
    - ``composition``: w_k = sum_s (n_ks / n_k) a_s / a. This would be the weight if the clip rate of each sign were the same
      at every length. Long responses are wrong more often, and wrong responses are clipped more often. This weight isolates
      the resulting effect.
    - ``conditional``: w_k is proportional to sum_s p_s a_ks, with sum_k p_k w_k = 1. This would be the weight if every bin
      had the same mix of signs as the run (direct standardisation). If a bin has no responses with sign s, a_ks is set to a_s.

    An empty bin has weight 1. If every response is clipped, all weights are NaN.
    """

    conditional: Tensor
    composition: Tensor
    total: Tensor
    share: Tensor  # p_k

    @classmethod
    def of(cls, count: Tensor, clipped: Tensor) -> LengthWeights:
        """Compute the weights from sums by length bin and sign.

        Args:
            count: ``(..., K, S)`` number of responses with a non-zero advantage, by bin and sign of the advantage.
            clipped: ``(..., K, S)`` sum of their clip decisions. For a token rule, a response contributes its share of
                clipped tokens.
        """
        accepted, count = count.double() - clipped.double(), count.double()
        number, of_sign, num_responses = count.sum(-1), count.sum(-2), count.sum((-2, -1))[..., None]
        mean = accepted.sum((-2, -1))[..., None] / num_responses
        by_sign = torch.where(of_sign > 0, accepted.sum(-2) / of_sign, 0.0)[..., None, :]
        rate = torch.where(count > 0, accepted / count, by_sign)
        standard = (rate * (of_sign / num_responses)[..., None, :]).sum(-1)
        share = number / num_responses
        known = torch.where(mean > 0, 1.0, torch.nan)

        def filled(weight: Tensor) -> Tensor:
            return torch.where(number > 0, weight, 1.0) * known

        return cls(
            conditional=filled(standard / (share * standard).sum(-1, keepdim=True)),
            composition=filled((count * by_sign).sum(-1) / number / mean),
            total=filled(accepted.sum(-1) / number / mean),
            share=share,
        )


def effective_sample_size(weights: Tensor) -> float:
    """Compute Kish's effective sample size as a share of n, ``(sum w)^2 / (n sum w^2)``, or 0 if all weights are 0."""
    square = float(weights.double().square().sum())
    return float(weights.double().sum()) ** 2 / (len(weights) * square) if square > 0 else 0.0
