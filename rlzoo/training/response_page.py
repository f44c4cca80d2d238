"""Collects the responses of a step and the rule's decision on every token for the page of responses in MLflow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from rlzoo.config.redaction import redact_settings
from rlzoo.config.run_config import RunConfig
from rlzoo.core import ops
from rlzoo.journal.rollouts import clipped_shares
from rlzoo.learner.batch import ScoredBatch
from rlzoo.learner.learner import Update
from rlzoo.measure.response_page import ShownResponse, Token, render
from rlzoo.rollout.types import RolloutGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_TOKENS = 20_000  # maximum number of tokens on a page, which then takes 1 MB

PARTIAL = "\N{WHITE VERTICAL RECTANGLE}"
"""The text shown for a token that ends inside a character, because a byte-level tokenizer may split characters."""

LONGEST_CHARACTER = 4  # maximum length in UTF-8 bytes, and therefore in tokens of a byte-level tokenizer


def response_page(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    groups: Sequence[RolloutGroup],
    batch: ScoredBatch,
    updates: Sequence[Update],
) -> str:
    """Render the graded responses to the ``tracking.completions`` prompts whose responses were clipped most.

    If these responses have more than `MOST_TOKENS` tokens, only those that were clipped most are shown.
    """
    rows_of = torch.split(torch.arange(len(batch)), [len(group.rollouts) for group in groups])
    shares = torch.tensor(clipped_shares(batch, updates))
    most = torch.stack([shares[rows].sum() for rows in rows_of]).argsort(descending=True, stable=True)
    prompts = most[: config.tracking.completions].tolist()
    rows = torch.cat([rows_of[prompt] for prompt in prompts])
    rows = rows[torch.isin(rows, torch.cat([update.minibatch.table_rows for update in updates]))]
    sizes: dict[int, int] = {}  # number of tokens that are shown, by row
    for row in rows[shares[rows].argsort(descending=True, stable=True)].tolist():
        size = min(len(batch.sequences[row]) - int(batch.prompt_lengths[row]), MOST_TOKENS - sum(sizes.values()))
        if size > 0:
            sizes[row] = size
    shown = [
        _shown_response((prompt, place), row, sizes[row], tokenizer, groups, batch, updates)
        for prompt in prompts
        for place, row in enumerate(rows_of[prompt].tolist())
        if row in sizes
    ]
    settings = redact_settings(config.clip.model_dump(mode="json"))
    facts = {
        "rule": f"{config.clip.name} ({', '.join(f'{key}={value}' for key, value in settings.items())})",
        "clipped": f"{int((shares > 0).sum())} of {len(batch)} responses of the step, in whole or in part",
        "shown": f"{len(shown)} of {len(rows)} responses to the {len(prompts)} most clipped of {len(groups)} prompts",
        "update": f"each response as of its last update, out of {len(updates)} in the step",
        "token": "coloured by its log-ratio: its log-prob before that update minus its log-prob before the step",
    }
    name = config.output.absolute().name if config.output else config.clip.name
    return render(f"{name}: what the rule clipped in step {batch.step}", facts, shown)


def _shown_response(
    number: tuple[int, int],
    row: int,
    size: int,
    tokenizer: PreTrainedTokenizerBase,
    groups: Sequence[RolloutGroup],
    batch: ScoredBatch,
    updates: Sequence[Update],
) -> ShownResponse:
    """Collect what the page shows about a row of ``size`` tokens. ``number`` holds the indices of its prompt and response."""
    prompt, place = number
    problem, rollout = groups[prompt].problem, groups[prompt].rollouts[place]
    index, update = max((index, update) for index, update in enumerate(updates) if row in update.minibatch.table_rows)
    minibatch, table = update.minibatch, update.minibatch.table
    at, judged = minibatch.rows.tolist().index(row), minibatch.table_rows.tolist().index(row)
    ids = batch.sequences[row][int(batch.prompt_lengths[row]) :].tolist()
    log_ratios = (minibatch.log_probs[at] - batch.old_log_probs[row]).tolist()
    chosen, clipped = batch.response_mask[row].tolist(), minibatch.clipped[judged].tolist()
    special = set(tokenizer.all_special_ids)
    values = [None] * len(chosen) if batch.values is None else batch.values[row].tolist()
    band = float(table.band_low[judged]), float(table.band_high[judged])
    ceiling = float(table.band_ceiling[judged])
    return ShownResponse(
        prompt=prompt + 1,
        response=place + 1,
        question=rollout.opening or problem.question,
        answer=problem.answer,
        tokens=[
            Token(text, log_ratios[t] if chosen[t] else None, clipped[t], ids[t] in special, values[t] if chosen[t] else None)
            for t, text in enumerate(token_texts(tokenizer, ids[:size]))
        ],
        hidden=len(ids) - size,
        length=rollout.length,
        finished=rollout.finished,
        reward=rollout.reward if rollout.reward is not None else math.nan,
        reward_parts=rollout.reward_parts,
        advantage=float(ops.per_response(batch.advantages[row : row + 1], batch.response_mask[row : row + 1])),
        clipped=sum(clipped),
        judged=float(table.log_ratio[judged]),
        band=None if any(map(math.isnan, band)) else band,
        ceiling=None if math.isnan(ceiling) else ceiling,
        update=index + 1,
    )


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds, including special tokens.

    A token that ends inside a character adds `PARTIAL`, and the token that completes the character adds the character.
    """
    decode = partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    alone = {token: str(decode([token])) for token in set(ids)}
    texts = [alone[token] for token in ids]
    if "".join(texts) == decode(list(ids)):
        return texts
    texts, start, read = [], 0, 0  # the text up to `read` is known; decoding from `start` keeps a token's context
    for end in range(1, len(ids) + 1):
        text = str(decode(list(ids[start:end])))
        if text.endswith("\N{REPLACEMENT CHARACTER}") and end - read < LONGEST_CHARACTER and end < len(ids):
            texts.append(PARTIAL)
            continue
        texts.append(text[len(str(decode(list(ids[start:read])))) :])
        start, read = read, end
    return texts
