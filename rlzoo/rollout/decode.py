"""Decodes with a transformers model, computing each prompt once for all its responses and skipping finished responses.

Transformers runs the forward passes, except that `fused` computes the tokens after the prompt for the models that it supports.
This module provides the loop, and `graphs` provides one for CUDA graphs. `HFSampler` checks each way against the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from rlzoo.models.acceleration import can_fuse
from rlzoo.models.autocast import uncached_autocast
from rlzoo.rollout.draws import Truncation, draw
from rlzoo.rollout.graphs import StaticSteps
from rlzoo.rollout.kept import KeptSets, by_response
from rlzoo.rollout.open_responses import Caches, OpenResponses, ResumedResponses

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Decoded:
    """Tokens drawn by `decode`, with their log-probs."""

    tokens: Tensor  # (B, T) int64
    log_probs: Tensor  # (B, T) float32, under the sampling distribution
    caches: Caches | None = None  # None unless the caches are kept for the next turn
    kept: list[KeptSets] | None = None  # sets of kept tokens for each response; None without truncation


def decode(
    model: PreTrainedModel,
    prompts: Sequence[tuple[int, ...]],
    uniforms: Tensor,
    *,
    end_ids: frozenset[int],
    pad_id: int,
    temperature: float,
    truncation: Truncation | None = None,
    fuses: bool = False,
    graphs: bool = False,
    places: Sequence[int] | None = None,
    caches: Caches | None = None,
) -> Decoded:
    """Draw a response to each prompt. Consecutive equal prompts are computed once.

    Args:
        model: model in evaluation mode for which `HFSampler` chose "graph", "fused" or "rows".
        prompts: B token sequences.
        uniforms: float64 ``(B, T)`` in [0, 1), one random number per token. T is the maximum length of a response.
        end_ids: tokens that end a response.
        pad_id: token ID that pads prompts on the left and responses on the right.
        temperature: sampling temperature.
        truncation: restricts which tokens are drawn.
        fuses: whether `FusedStep` computes the tokens after the prompt, which requires `can_fuse`.
        graphs: whether `StaticSteps` draws these tokens (in CUDA graphs if the model is on a CUDA device); requires ``fuses``.
        places: indices under which the prompts' caches are kept for the next turn; None keeps no caches.
        caches: caches from the previous turn. Every prompt starts with the tokens that they cover.
    """
    limit = uniforms.shape[1]
    # without fusion, the model may keep tensors that training would reuse, such as a mask, so avoid inference mode
    with torch.inference_mode() if fuses else torch.no_grad():
        numbers, ends = uniforms.t().contiguous().to(model.device), torch.tensor(sorted(end_ids), device=model.device)
        responses: OpenResponses
        if caches is None:
            keeps = places is not None
            responses = OpenResponses(model, prompts, pad_id, limit, fuses=fuses, graphs=graphs, keeps=keeps)
        else:
            assert places is not None, "caches require places"
            responses = ResumedResponses(model, prompts, pad_id, limit, caches, places, fuses=fuses, graphs=graphs)
        # one pass uses every weight once, so cached bfloat16 copies would only add to the memory that `FusedStep` takes
        with uncached_autocast(model.device.type) if fuses else nullcontext():
            logits = responses.first_logits()
        if graphs:
            steps = StaticSteps(responses, logits, numbers, ends, pad_id, temperature, truncation)
            del logits  # a large tensor
            steps.run()
            held = None if places is None else responses.caches(places)
            kept = None if truncation is None else by_response(steps.kept, len(prompts))
            return Decoded(steps.tokens, steps.log_probs, held, kept)
        tokens = torch.full((len(prompts), limit), pad_id, device=model.device)
        log_probs = torch.zeros(len(prompts), limit, device=model.device)
        columns: list[tuple[Tensor, KeptSets]] = []
        for column in range(limit):
            rows = responses.rows
            if truncation is not None:
                logits = truncation(logits, temperature)
                columns.append((rows, KeptSets.of_mask(logits > -torch.inf)))
            drawn, reported = draw(logits, numbers[column].index_select(0, rows), temperature)
            tokens[rows, column], log_probs[rows, column] = drawn, reported
            drawn = responses.close((drawn[:, None] == ends).any(dim=1), drawn)
            if not len(drawn) or column + 1 == limit:
                break
            logits = responses.next_logits(drawn)
        held = None if places is None else responses.caches(places)
        kept = None if truncation is None else by_response(columns, len(prompts))
        return Decoded(tokens[:, : column + 1], log_probs[:, : column + 1], held, kept)


Way = Literal["graph", "fused", "rows", "generate", "equal", "plain"]
"""How responses are decoded: row by row with `FusedStep` or the model's forward pass, or with transformers' `generate`.

In the first way, `StaticSteps` calls `FusedStep`, in graphs on a CUDA device. The last two ways decode prompts of equal length
together, so that none is padded: "equal" with `generate`, and "plain" with a pass over the whole row for every token.
"""


def possible_ways(model: PreTrainedModel, graphs: Literal["auto", "on", "off"] = "auto") -> tuple[Way, ...]:
    """Return the possible ways of decoding with the model, fastest first. Each must be checked against the model before use.

    Args:
        model: the model.
        graphs: when "graph" may be used: "auto" on a CUDA device, "on" always and as the only way, "off" never.
    """
    try:
        has_plain_caches = all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)
    except (AttributeError, LookupError, TypeError, ValueError):  # the configuration does not describe one decoder
        has_plain_caches = False
    has_rows = has_plain_caches and model.config._attn_implementation in ("eager", "sdpa")
    fuses = has_rows and can_fuse(model)
    if graphs == "on":
        return ("graph",) if fuses else ()
    graph: tuple[Way, ...] = ("graph",) if fuses and graphs == "auto" and model.device.type == "cuda" else ()
    return (*graph, *(("fused",) if fuses else ()), *(("rows",) if has_rows else ()), "generate", "equal", "plain")
