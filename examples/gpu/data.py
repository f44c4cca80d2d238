"""A Qwen3 model with random weights, and a batch of ragged, off-policy responses whose log-ratios are known."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from examples.gpu.oracle import RULES, Rule
from rlzoo import load_zoo
from rlzoo.config.sections import LearnerConfig
from rlzoo.learner.batch import ScoredBatch
from rlzoo.learner.learner import Learner

KEPT = ((0.0, 0.8), (1.25, 2.6), (3.4, 4.0))
"""Log-ratios to draw, in units of the band's width. Rounding cannot move any of them across an edge or the ceiling."""


def make_model(quick: bool, seed: int = 0) -> Any:
    """Return a Qwen3 model with random weights that is large enough for a GPU to use its usual kernels."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hidden, layers, vocabulary = (64, 2, 512) if quick else (512, 4, 8192)
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=hidden // 4,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            initializer_range=0.1,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    )


@dataclass(frozen=True, slots=True)
class Data:
    """A batch and the facts about it that the oracle needs."""

    batch: ScoredBatch  # old log-probs are 0 until `off_policy` sets them
    log_ratios: Tensor  # (B, T) float64, at the positions of the mask
    rule: str

    def rows(self) -> list[tuple[Tensor, Tensor]]:
        """Return each response's tokens and the positions of the tokens that the model chose."""
        numbered = zip(self.batch.sequences, self.batch.prompt_lengths, self.batch.response_mask, strict=True)
        return [(tokens, prompt + mask.nonzero()[:, 0]) for tokens, prompt, mask in numbered]

    def packed_log_ratios(self) -> Tensor:
        """Return the log-ratios moved to the start of each row."""
        packed = torch.zeros_like(self.log_ratios)
        for row, mask in enumerate(self.batch.response_mask):
            packed[row, : int(mask.sum())] = self.log_ratios[row, mask]
        return packed


def make_data(rule: str, quick: bool, band: Rule | None = None, seed: int = 1) -> Data:
    """Draw responses to prompts of different lengths, and draw log-ratios, some of which are outside the rule's band.

    Every third response has a gap in its mask, as between two turns of an episode.

    Args:
        rule: name of the rule.
        quick: draw fewer and shorter responses.
        band: replaces the rule's band in `RULES`.
        seed: seed of all random numbers.
    """
    rng = torch.Generator().manual_seed(seed)
    number, longest, vocabulary = (12, 24, 512) if quick else (32, 160, 8192)
    lengths = torch.randint(2, longest, (number,), generator=rng)
    lengths[0] = longest
    prompts = torch.randint(2, 12, (number,), generator=rng)
    sizes = (prompts + lengths).tolist()
    sequences = tuple(torch.randint(2, vocabulary, (size,), generator=rng) for size in sizes)
    mask = torch.arange(longest) < lengths[:, None]
    for row in range(1, number, 3):
        if lengths[row] > 8:
            mask[row, 4:7] = False
    advantages = torch.randn(number, 1, generator=rng)
    log_ratios = _log_ratios(band or RULES[rule], mask, rng)
    empty = torch.zeros(mask.shape)
    batch = ScoredBatch(
        step=0,
        sequences=sequences,
        prompt_lengths=prompts,
        response_mask=mask,
        turn_ids=torch.where(mask, 0, -1),
        rollout_log_probs=empty,
        rewards=advantages[:, 0],
        group_ids=torch.arange(number) // 4,
        finished=torch.ones(number, dtype=torch.bool),
        old_log_probs=empty,
        advantages=advantages,
        seed=0,
    )
    return Data(batch, log_ratios, rule)


def _log_ratios(rule: Rule, mask: Tensor, rng: torch.Generator) -> Tensor:
    """Return log-ratios whose pooled value is the band's width times a factor from one of the ranges in `KEPT`."""

    def draw(length: int) -> float:
        start, end = KEPT[int(torch.randint(len(KEPT), (), generator=rng))]
        width = start + (end - start) * float(torch.rand((), generator=rng))
        low, high, _ = rule.edges(length)
        return width * (low if float(torch.rand((), generator=rng)) < 0.4 else high)

    drawn = torch.zeros(mask.shape, dtype=torch.float64)
    for row, own in enumerate(mask):
        length = int(own.sum())
        if rule.pool == "token":
            drawn[row, own] = torch.tensor([draw(length) for _ in range(length)], dtype=torch.float64)
            continue
        noise = 0.02 * torch.randn(length, generator=rng, dtype=torch.float64)
        wanted = draw(length) * (length if rule.pool == "mean" else 1)
        drawn[row, own] = noise - noise.mean() + wanted / length
    assert math.isfinite(float(drawn.sum()))
    return drawn


def make_learner(rule: str, model: Any, clip: dict[str, Any] | None = None, **settings: Any) -> Learner:
    """Return a learner with a copy of the model."""
    padding = settings.pop("padding_side", "right")
    policy = load_zoo()[rule](**(clip or {}))
    config = LearnerConfig(lr=1e-3, **settings)
    learner = Learner(copy.deepcopy(model), policy, config, pad_id=0, max_length=512, num_updates=10)
    learner.micro_batches.padding_side = padding
    return learner


def off_policy(learner: Learner, data: Data) -> ScoredBatch:
    """Return the batch with old log-probs that differ from the learner's log-probs by the given log-ratios.

    The learner's log-probs come from the same forward passes as in learning, so the log-ratios are exact in any data type.
    """
    current = torch.zeros(data.batch.response_mask.shape)
    rows = torch.arange(len(data.batch))
    for piece in learner.micro_batches.of(data.batch, rows, learns=True):
        current[piece.rows] = learner.micro_batches.forward(learner.model, data.batch, piece.rows)[0].detach().float().cpu()
    old = torch.where(data.batch.response_mask, current.double() - data.log_ratios, 0.0).float()
    return replace(data.batch, old_log_probs=old, rollout_log_probs=old)


def gradient_of(learner: Learner, batch: ScoredBatch) -> dict[str, Tensor]:
    """Return each weight's gradient for one step on the whole batch, as a float64 tensor on the CPU."""
    learner.accumulate(batch, torch.arange(len(batch)))
    found = {
        name: torch.zeros_like(each) if each.grad is None else each.grad
        for name, each in learner.language_model.named_parameters()
    }
    return {name: each.detach().cpu().double() for name, each in found.items()}


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the relative L2 error over all weights."""
    assert found.keys() == wanted.keys(), sorted(found.keys() ^ wanted.keys())
    error = math.fsum(float((found[name].double() - wanted[name].double()).square().sum()) for name in wanted)
    return math.sqrt(error / math.fsum(float(each.double().square().sum()) for each in wanted.values()))
