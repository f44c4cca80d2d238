"""Four rules and a Qwen3 model in float64 on the CPU, written from the formulas with no code from rlzoo or transformers.

The gradient of a step is the sum over tokens of dJ/dlog_prob times the gradient of the token's log-prob. Here, dJ/dlog_prob
is computed without automatic differentiation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rule:
    """A band on the pooled log-ratios of a response. ``low``, ``high`` and ``ceiling`` are its edges."""

    pool: Literal["token", "mean", "sum"]
    low: float
    high: float
    ceiling: float | None = None  # upper edge where the advantage is negative
    grows: bool = False  # whether the edges grow with the square root of the length

    def edges(self, length: int) -> tuple[float, float, float]:
        """Return the lower edge, upper edge and ceiling of the log-ratio for a response of ``length`` tokens."""
        scale = math.sqrt(length) if self.grows else 1.0
        return self.low * scale, self.high * scale, math.inf if self.ceiling is None else self.ceiling * scale

    def slope(self, log_ratio: float, advantage: float, length: int) -> float:
        """Return the derivative of m = min(r A, clip(r) A) or, where A < 0, of max(m, c A) with respect to the log-ratio."""
        low, high, ceiling = self.edges(length)
        kept = log_ratio <= high if advantage > 0 else low <= log_ratio <= ceiling
        return math.exp(log_ratio) * advantage if kept else 0.0

    def derivative(self, log_ratios: Sequence[float], advantage: float) -> list[float]:
        """Return dJ/dlog_prob for every token of a response, where J is the mean over the terms of the response."""
        length = len(log_ratios)
        if self.pool == "token":
            return [self.slope(one, advantage, length) / length for one in log_ratios]
        pooled = math.fsum(log_ratios) / (length if self.pool == "mean" else 1)
        each = self.slope(pooled, advantage, length) / (length if self.pool == "mean" else 1)
        return [each] * length


RULES = {
    "fspo": Rule("sum", -0.03, 0.03, 0.09, grows=True),
    "gspo": Rule("mean", math.log(1 - 3e-4), math.log(1 + 4e-4)),
    "grpo": Rule("token", math.log(0.8), math.log(1.2)),
    "rloo": Rule("sum", math.log(0.8), math.log(1.2)),
}
"""The rules with rlzoo's default settings. All of them average over responses."""


def _normed(values: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return values / (values.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight


def _rotated(values: Tensor, base: float) -> Tensor:
    """Rotate the pairs (i, i + d/2) of ``(heads, T, d)`` by t * base^(-2i/d)."""
    half = values.shape[-1] // 2
    rates = base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(values.shape[1], dtype=torch.float64)[:, None] * rates
    first, second = values[..., :half], values[..., half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], dim=-1)


def log_probs(weights: Mapping[str, Tensor], config: Any, tokens: Tensor) -> Tensor:
    """Return the log-probs of all tokens in a row except the first for a Qwen3 model with tied embeddings.

    Args:
        weights: float64 weights, by their names in transformers.
        config: transformers' configuration.
        tokens: ``(T,)``.
    """
    length, epsilon = len(tokens), config.rms_norm_eps
    heads, keys, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    base = config.rope_parameters["rope_theta"]
    hidden = weights["model.embed_tokens.weight"][tokens]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    for layer in range(config.num_hidden_layers):

        def weight(name: str, layer: int = layer) -> Tensor:
            return weights[f"model.layers.{layer}.{name}.weight"]

        def projected(name: str, values: Tensor, number: int) -> Tensor:
            return (values @ weight(f"self_attn.{name}").T).view(length, number, size).transpose(0, 1)

        normed = _normed(hidden, weight("input_layernorm"), epsilon)
        query = _rotated(_normed(projected("q_proj", normed, heads), weight("self_attn.q_norm"), epsilon), base)
        key = _rotated(_normed(projected("k_proj", normed, keys), weight("self_attn.k_norm"), epsilon), base)
        value = projected("v_proj", normed, keys)
        key, value = (each.repeat_interleave(heads // keys, dim=0) for each in (key, value))
        scores = (query @ key.transpose(1, 2) / math.sqrt(size)).masked_fill(future, -math.inf)
        seen = (scores.softmax(-1) @ value).transpose(0, 1).reshape(length, heads * size)
        hidden = hidden + seen @ weight("self_attn.o_proj").T
        normed = _normed(hidden, weight("post_attention_layernorm"), epsilon)
        gate = normed @ weight("mlp.gate_proj").T
        hidden = hidden + (gate * gate.sigmoid() * (normed @ weight("mlp.up_proj").T)) @ weight("mlp.down_proj").T
    hidden = _normed(hidden, weights["model.norm.weight"], epsilon)
    logits = hidden[:-1] @ weights["model.embed_tokens.weight"].T
    return logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]


def gradient(
    rule: Rule,
    weights: Mapping[str, Tensor],
    config: Any,
    rows: Sequence[tuple[Tensor, Tensor]],
    log_ratios: Tensor,
    advantages: Sequence[float],
) -> dict[str, Tensor]:
    """Return the gradient of the loss -J with respect to each weight.

    Args:
        rule: the rule.
        weights: weights of any type, by their names in transformers.
        config: transformers' configuration of the model.
        rows: for each response, the tokens of the prompt and the response, and the positions of the tokens that the model
            chose.
        log_ratios: ``(B, T)``. The log-ratios at these positions are, in order, at the start of each row.
        advantages: one for each response.
    """
    own = {name: tensor.detach().cpu().double().requires_grad_() for name, tensor in weights.items()}
    for row, ((tokens, places), advantage) in enumerate(zip(rows, advantages, strict=True)):
        slopes = rule.derivative(log_ratios[row, : len(places)].tolist(), advantage)
        chosen = log_probs(own, config, tokens)[places - 1]
        (-(torch.tensor(slopes, dtype=torch.float64) * chosen).sum() / len(rows)).backward()
    return {name: torch.zeros_like(each) if each.grad is None else each.grad for name, each in own.items()}
