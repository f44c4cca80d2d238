"""Shows side by side the responses that two rules treat most differently."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from rlzoo.core import ops
from rlzoo.core.errors import UserError
from rlzoo.gate.tokens import local_tokenizer
from rlzoo.lab.recorded import RecordedUpdate
from rlzoo.lab.replay import applied
from rlzoo.lab.study import Study
from rlzoo.measure.response_page import ShownResponse, Token, render
from rlzoo.measure.response_table import ResponseTable
from rlzoo.training.response_page import MOST_TOKENS, token_texts

MOST_RESPONSES = 24  # maximum number of responses on a page

Treatment = tuple[ResponseTable, Tensor, Tensor]  # the table, clip decisions and gradient weights of one rule


def differences_page(study: Study) -> str:
    """Render the responses on which the study's two rules differ most, with each token's gradient weight under each rule."""
    found, room = sorted(_differences(study)), MOST_TOKENS // 2  # every token is shown twice
    numbers = {number for _, _, number, _, _ in found[:MOST_RESPONSES]}
    updates = {number: update for number, update in enumerate(study.run.updates) if number in numbers}
    tokenizer, shown = None, list[ShownResponse]()
    with suppress(UserError):  # the trainer may name no model, or one that is not on this machine
        tokenizer = local_tokenizer(study.run.model)
    special = set(() if tokenizer is None else tokenizer.all_special_ids)
    for _, _, number, row, is_above in found[:MOST_RESPONSES]:
        update, batch = updates[number], updates[number].batch
        at, inputs = int(update.rows[row]), update.inputs
        ids, start, chosen = batch.sequences[at].tolist(), int(batch.prompt_lengths[at]), batch.response_mask[at].tolist()
        texts = [f"{token} " for token in ids] if tokenizer is None else token_texts(tokenizer, ids)
        log_ratios, group, texts_shown = ops.log_ratio(inputs)[row].tolist(), batch.group_ids[at], texts[start : start + room]
        room -= len(texts_shown)
        sides = {}
        for rule, (table, clipped, weights) in zip(study.rules, _treatments(study, number, update, is_above), strict=True):
            marks, values = clipped[row].tolist(), weights[row].tolist()
            edges = [float(edge[row]) for edge in (table.band_low, table.band_high, table.band_ceiling)]
            sides[rule.label] = ShownResponse(
                step=update.step,
                prompt=1 + int((torch.unique(batch.group_ids) < group).sum()),
                response=int((batch.group_ids[: at + 1] == group).sum()),
                question="".join(texts[:start]),
                answer="",  # a rollout file holds no answers
                tokens=[
                    Token(text, log_ratios[t], marks[t], ids[start + t] in special, weight=values[t])
                    if chosen[t]
                    else Token(text)
                    for t, text in enumerate(texts_shown)
                ],
                hidden=len(ids) - start - len(texts_shown),
                length=sum(chosen),
                finished=bool(batch.finished[at]),
                reward=float(batch.rewards[at]),
                reward_parts={},
                advantage=float(ops.per_response(inputs.advantages, inputs.response_mask)[row]),
                clipped=sum(marks),
                judged=float(table.log_ratio[row]),
                band=None if math.isnan(edges[0] + edges[1]) else (edges[0], edges[1]),
                ceiling=None if math.isnan(edges[2]) else edges[2],
                update=update.index + 1,
                weight=float(table.weight[row]),
            )
        shown.append(replace(sides[study.rules[0].label], sides=sides))
    unlike = sum(one[0] < 0 for one in found)
    facts = {
        **{f"rule {rule.label}": rule.note or rule.widths or "no width" for rule in study.rules},
        "clip fraction": "as configured" if study.match is None else f"matched at {study.goal}",
        "different": f"one rule clips tokens that the other keeps in {unlike:,} of {len(found):,} responses",
        "shown": f"the {len(shown)} with the largest share of such tokens; among equal shares, those whose weights differ most",
    }
    return render(f"{study.run.path.name}: where {' and '.join(sides)} differ", facts, shown)


def _differences(study: Study) -> Iterator[tuple[float, float, int, int, bool]]:
    """Yield the responses that the study counts (those with a nonzero advantage), once for each update that contains them.

    An item holds the negated share of tokens that only one rule clips, the negated mean difference of the tokens' gradient
    weights, the index of the update, the row in the update, and whether the advantage is positive.
    """
    for number, update in enumerate(study.run.updates):
        for is_above in (False, True) if not study.skip_steps or update.step > study.skip_steps else ():
            (table, clipped, weights), (_, other, others) = _treatments(study, number, update, is_above)
            apart = ((clipped ^ other).float(), (weights - others).abs())
            shares, means = (-ops.per_response(values, update.inputs.response_mask)[:, 0] for values in apart)
            counted = (table.signal > 0) & (table.length > 0) & ((table.advantage > 0) == is_above)
            for row in counted.nonzero()[:, 0].tolist():
                yield float(shares[row]), float(means[row]), number, row, is_above


def _treatments(study: Study, number: int, update: RecordedUpdate, is_above: bool) -> Iterator[Treatment]:
    """For an update, yield each rule's table, clip decisions and gradient weights at the rule's widths for one sign of A."""
    for rule in study.rules:
        side = rule.above if is_above and rule.above else rule
        judged, on_policy, table = applied(study.run, update, side.states[number])
        weights = torch.where(on_policy == 0, 0.0, judged.gradient / on_policy)
        yield table, judged.result.clipped & update.inputs.response_mask, weights
