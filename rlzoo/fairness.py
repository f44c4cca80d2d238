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


def bin_sums(index: Tensor, values: Tensor, num_bins: int = NUM_BINS) -> Tensor:
    """Sum of ``(n,)`` values in each bin, float64 ``(num_bins,)``; ``index`` from `bin_index`."""
    return torch.zeros(num_bins, dtype=torch.float64).index_add_(0, index, values.double())


@dataclass(frozen=True, slots=True)
class LengthWeights:
    """The weight that clipping leaves to each length bin, relative to its share of the responses, float64 ``(..., K)``.

    A weight of .8 means that the responses of a bin count a fifth less than they were sampled. With counts n_ks by bin k and
    sign s of the advantage, acceptance a_ks (the share that was not clipped), shares p_k of the bins and p_s of the signs,
    a_s the acceptance of a sign at all lengths, and a the acceptance of all responses:

    - ``total``: w_k = sum_s (n_ks / n_k) a_ks / a, what happened to the bin.
    - ``composition``: w_k = sum_s (n_ks / n_k) a_s / a, what would have happened if every sign were clipped alike at every
      length. Long responses are wrong more often, and wrong ones are clipped more often; this part is due to that alone.
    - ``conditional``: w_k is proportional to sum_s p_s a_ks with sum_k p_k w_k = 1, what would have happened if every bin had
      the mix of signs of the run (direct standardisation). Where a bin has no response of a sign, a_ks is a_s.

    An empty bin has the weight 1. Everything is NaN where everything is clipped.
    """

    conditional: Tensor
    composition: Tensor
    total: Tensor
    share: Tensor  # p_k

    @classmethod
    def of(cls, count: Tensor, clipped: Tensor) -> LengthWeights:
        """Compute the weights from sums by length bin and sign.

        Args:
            count: ``(..., K, S)`` responses with a non-zero advantage, by bin and sign of the advantage.
            clipped: ``(..., K, S)`` sum of their clip decisions; for a token rule a response's is its share of clipped tokens.
        """
        accepted, count = count.double() - clipped.double(), count.double()
        number, of_sign, whole = count.sum(-1), count.sum(-2), count.sum((-2, -1))[..., None]
        mean = accepted.sum((-2, -1))[..., None] / whole
        by_sign = torch.where(of_sign > 0, accepted.sum(-2) / of_sign, 0.0)[..., None, :]
        rate = torch.where(count > 0, accepted / count, by_sign)
        standard = (rate * (of_sign / whole)[..., None, :]).sum(-1)
        share = number / whole
        known = torch.where(mean > 0, 1.0, torch.nan)

        def filled(weight: Tensor) -> Tensor:
            return torch.where(number > 0, weight, 1.0) * known

        return cls(
            conditional=filled(standard / (share * standard).sum(-1, keepdim=True)),
            composition=filled((count * by_sign).sum(-1) / number / mean),
            total=filled(accepted.sum(-1) / number / mean),
            share=share,
        )


def length_reweighting_error(weight: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Length reweighting error (arXiv 2509.09177) of the weights w_k of length bins with shares p_k.

    Both errors are 0 when nothing is clipped, and grow with what is: compare policies only at a matched clip fraction.

    Args:
        weight: ``(..., K)``, one of the weights of `LengthWeights`.
        share: ``(..., K)``.

    Returns:
        ``lre_max``, the largest |w_k - 1|, and ``lre_mean``, the sum of p_k |w_k - 1|, float64 ``(...)``.

    Example:
        Half of the responses in each of two bins, a clip fraction of 0 in one and 0.5 in the other: acceptance 1 and 0.5,
        mean 0.75, so ``lre_max = max(|1/.75 - 1|, |.5/.75 - 1|) = 1/3``, and ``lre_mean = 1/3``.
    """
    error = (weight - 1).abs()
    return error.amax(-1), (share * error).sum(-1)


def effective_sample_size(weights: Tensor) -> float:
    """Kish's effective share ``(sum w)^2 / (n sum w^2)`` of n importance weights, between 0 and 1; 0 if all weights are 0."""
    square = float(weights.double().square().sum())
    return float(weights.double().sum()) ** 2 / (len(weights) * square) if square > 0 else 0.0
