"""Draws tokens by inverse transform sampling, with separate random numbers for each response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlzoo.core.errors import RunError
from rlzoo.rollout.kept import KeptSets, by_response

BLOCK = 256  # number of probabilities per block; a draw finds its block first and then the token


def row_uniforms(seed: int, rows: Sequence[int], num_tokens: int, turn: int = 0) -> Tensor:
    """Return float64 random numbers ``(rows, num_tokens)`` in [0, 1) that depend only on the seed, the row and the turn."""
    return torch.from_numpy(np.stack([np.random.default_rng([seed, row, turn]).random(num_tokens) for row in rows]))


@dataclass(frozen=True, slots=True)
class Truncation:
    """Restricts sampling to the most probable tokens, first to the ``top_k`` largest logits and then by top-p.

    Top-k keeps every token whose logit is at least the k-th largest. Of these tokens, top-p keeps the most probable ones, up
    to and including the token at which their total probability reaches ``top_p``. It therefore keeps at least one token.
    These are the conventions of transformers' ``TopKLogitsWarper`` and ``TopPLogitsWarper``. Among tokens with equal
    probabilities at the edge of top-p, those with higher IDs are kept first.

    Example:
        ``Truncation(top_p=0.9)(logits, temperature=1.0)`` keeps the most probable tokens, whose probabilities
        add up to at least 0.9.
    """

    top_p: float = 1.0  # in (0, 1]
    top_k: int | None = None  # at least 1; None for no limit

    @classmethod
    def of(cls, top_p: float, top_k: int | None) -> Truncation | None:
        """Return the truncation for these settings, or None if they keep all tokens."""
        return None if top_p == 1.0 and top_k is None else cls(top_p, top_k)

    def __call__(self, logits: Tensor, temperature: float) -> Tensor:
        """Return float32 logits ``(B, V)``, not divided by the temperature, with -inf for tokens that are dropped."""
        logits = logits.float()
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            smallest = logits.topk(self.top_k, dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < smallest, -torch.inf)
        if self.top_p < 1.0:
            ascending, order = logits.sort(dim=-1, stable=True)
            sums = (ascending / temperature).softmax(dim=-1, dtype=torch.float64).cumsum(dim=-1)
            dropped = sums <= 1.0 - self.top_p
            dropped[:, -1] = False
            logits = logits.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), -torch.inf)
        return logits


def refuse_nan(log_probs: Tensor) -> None:
    """Raise RunError if a log-prob is NaN. This happens if a logit is NaN or +inf, or if all logits of a token are -inf."""
    if number := int(log_probs.isnan().sum()):
        what = "check its weights for NaN and infinity, and whether model.dtype can hold its activations"
        raise RunError(f"the model's logits are not finite for {number} of {log_probs.numel()} tokens; {what}")


def draw(logits: Tensor, numbers: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Draw, in each row, the token at which the cumulative probability exceeds the row's random number.

    The result depends only on the row's logits and random number, not on other rows or on the process that samples.

    Args:
        logits: ``(B, V)``.
        numbers: float64 ``(B,)`` in [0, 1).
        temperature: sampling temperature.

    Returns:
        Tokens, int64 ``(B,)``, and their log-probabilities, float32 ``(B,)``, in nats.
    """
    scaled = logits.float() / temperature
    tokens, log_probs = (_at_once if scaled.shape[-1] <= BLOCK else _by_blocks)(scaled, numbers)
    return tokens.squeeze(-1), log_probs.squeeze(-1).float()


def _at_once(logits: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Draw tokens ``(B, 1)`` with their log-probabilities ``(B, 1)``."""
    log_probs = logits.log_softmax(dim=-1, dtype=torch.float64)
    sums = log_probs.exp().cumsum(dim=-1)
    tokens = _first_above(sums, numbers[:, None] * sums[:, -1:])
    return tokens, log_probs.gather(-1, tokens)


def _by_blocks(logits: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Draw the same tokens as `_at_once`, but find the block of each token first."""
    largest = logits.amax(dim=-1, keepdim=True)
    masses = (logits - largest).exp()  # unnormalised probabilities
    blocks = torch.nn.functional.pad(masses, (0, -masses.shape[-1] % BLOCK)).view(len(masses), -1, BLOCK)
    ends = blocks.sum(dim=-1).double().cumsum(dim=-1)  # (B, blocks)
    total = ends[:, -1:]
    wanted = numbers[:, None] * total
    block = _first_above(ends, wanted)
    before = torch.where(block > 0, ends.gather(-1, (block - 1).clamp(min=0)), 0.0)
    within = blocks.gather(1, block[..., None].expand(-1, -1, BLOCK)).squeeze(1).double().cumsum(dim=-1)
    tokens = block * BLOCK + _first_above(within, wanted - before)
    return tokens, logits.gather(-1, tokens) - largest - total.log()


def _first_above(sums: Tensor, wanted: Tensor) -> Tensor:
    """Return the index at which the cumulative sums ``(B, N)`` first exceed ``wanted`` ``(B, 1)`` or stop growing."""
    last = (sums < sums[:, -1:]).sum(dim=-1, keepdim=True)
    return torch.minimum(torch.searchsorted(sums, wanted, right=True), last)


class OwnDraws:
    """A logits processor that draws every token with `draw` and records its log-probability.

    The processor applies the temperature and the truncation, so that the log-probabilities refer to the sampling distribution.
    """

    def __init__(self, uniforms: Tensor, temperature: float, truncation: Truncation | None = None) -> None:
        self.uniforms = uniforms  # (B, T) in [0, 1), float64
        self.temperature = temperature
        self.truncation = truncation
        self._sets: list[tuple[Tensor, KeptSets]] = []
        self._log_probs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores ``(B, V)`` whose maximum is at the drawn token. `generate` calls this method before each token."""
        if self.truncation is not None:
            scores = self.truncation(scores, self.temperature)
            self._sets.append((torch.arange(len(scores)), KeptSets.of_mask(scores > -torch.inf)))
        tokens, log_probs = draw(scores, self.uniforms[:, len(self._log_probs)], self.temperature)
        self._log_probs.append(log_probs)
        return torch.full_like(scores, -torch.inf, dtype=torch.float32).scatter(-1, tokens[:, None], 0.0)

    def log_probs(self) -> Tensor:
        """Return the log-probabilities ``(B, T)`` of the T tokens drawn so far."""
        return torch.stack(self._log_probs, dim=1)

    def kept(self) -> list[KeptSets] | None:
        """Return the sets of kept tokens for each response, or None without truncation."""
        return None if self.truncation is None else by_response(self._sets, len(self.uniforms))
