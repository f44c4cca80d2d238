"""Makes every installed rule available as a loss for Tinker's ``forward_backward_custom``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlzoo.core import ops
from rlzoo.core.errors import UserError
from rlzoo.core.fairness import LengthWeights, bin_edges, bin_index, bin_sums
from rlzoo.core.reductions import StepCounts, reduce_objective
from rlzoo.core.types import ClipInputs, ClipResult
from rlzoo.integrations.rules import check_supported, one_per_response, rule
from rlzoo.journal.rollout_file import turns
from rlzoo.learner.judge import judge

KEYS = ("logprobs", "advantages", "mask")
"""The keys of ``Datum.loss_fn_inputs`` that are read, as named by tinker-cookbook."""
INSTEAD = {"advantage": 'the values of loss_fn_inputs["advantages"]'}

CustomLoss = Callable[[list[Any], list[Any]], tuple[Any, dict[str, float]]]


def loss_fn(
    name: str,
    *,
    group_ids: Sequence[int] | None = None,
    rewards: Sequence[float] | None = None,
    max_length: int | None = None,
    **settings: Any,
) -> CustomLoss:
    """Create a loss function for ``TrainingClient.forward_backward_custom``.

    From each datum, the loss reads the keys that tinker-cookbook writes: ``logprobs`` (the sampler's log-probs, which are the
    denominator of the ratio), ``advantages`` and ``mask``. Each datum is a response, and a gap in the mask starts a new turn.
    The rule's reduction applies to the data of one call, so one call corresponds to one optimizer step.

    Args:
        name: name of the rule, optionally with settings, such as ``"my-rule/width_low:0.02"``.
        group_ids: one number per datum, equal for responses to the same prompt. Rules that compare groups need it.
        rewards: one reward per datum. Rules that read rewards need it.
        max_length: maximum number of model tokens in a response. The reduction ``constant_length`` divides by it.
        **settings: settings of the rule.

    Returns:
        A function that takes data and their log-probs, and returns the loss and the metrics.

    Raises:
        UserError: the rule is unknown, its settings are invalid, or it needs something that the data do not contain.
    """
    policy = rule(name, INSTEAD, **settings)
    optional = {"group_ids": group_ids, "rewards": rewards, "max_length": max_length}
    needs = {*policy.needs, *(["group_ids"] if policy.reduction == "prompt_mean" else [])}
    missing = sorted(key for key in needs & optional.keys() if optional[key] is None)
    if missing:
        raise UserError(f"{policy.name} needs {', '.join(missing)}: pass {missing[0]}= to loss_fn")
    if policy.reduction == "constant_length" and max_length is None:
        raise UserError(f"{policy.name} has the reduction constant_length: pass max_length= to loss_fn")
    check_supported(policy, "Tinker", ("turn_ids", *optional))

    def loss(data: list[Any], logprobs: list[Any]) -> tuple[Tensor, dict[str, float]]:
        columns = {key: _padded(data, logprobs, key) for key in KEYS}
        mask = columns["mask"] > 0
        advantages = columns["advantages"]
        if policy.scope != "token":
            advantages = one_per_response(advantages, mask, f"advantages for {policy.name}")
        rule_inputs = ClipInputs(
            pad_sequence(logprobs, batch_first=True),
            columns["logprobs"],
            advantages,
            mask,
            rollout_log_probs=columns["logprobs"],
            seed=int(torch.randint(2**31, ())),  # Tinker does not pass the step
            turn_ids=turns(mask) if "turn_ids" in policy.needs else None,
            group_ids=_column(data, group_ids, "group_ids", torch.int64),
            rewards=_column(data, rewards, "rewards", torch.float32),
            max_length=max_length,
        )
        result = judge(policy, rule_inputs)
        counts = StepCounts.of(mask, rule_inputs.group_ids)
        total = reduce_objective(result.objective, mask, policy.reduction, counts, max_length)
        return -total, _metrics(result, advantages, mask)

    return loss


def _padded(data: list[Any], logprobs: list[Any], key: str) -> Tensor:
    """Return the data's values for a key, padded with 0 to ``(B, T)``, on the device of the log-probs.

    Raises:
        UserError: a datum lacks the key.
    """
    rows = []
    for index, (datum, current) in enumerate(zip(data, logprobs, strict=True)):
        if key not in datum.loss_fn_inputs:
            raise UserError(
                f'datum {index} has no loss_fn_inputs["{key}"] (it has: {", ".join(datum.loss_fn_inputs)}); '
                "pass data as tinker-cookbook assembles them, with the mask"
            )
        rows.append(datum.loss_fn_inputs[key].to_torch().to(current.device))
    return pad_sequence(rows, batch_first=True)


def _column(data: list[Any], values: Sequence[float] | None, name: str, dtype: torch.dtype) -> Tensor | None:
    """Return one value per datum as ``(B, 1)``."""
    if values is None:
        return None
    if len(values) != len(data):
        raise UserError(f"loss_fn got {len(values)} {name} for {len(data)} data")
    return torch.tensor(values, dtype=dtype)[:, None]


@torch.no_grad()
def _metrics(result: ClipResult, advantages: Tensor, mask: Tensor) -> dict[str, float]:
    """Return the clip fraction of the responses with A != 0, overall and by length, and the length reweighting error."""
    counted = (torch.where(mask, advantages, 0.0) != 0).any(1)
    if not bool(counted.any()):
        return {}
    lengths = mask.sum(1)[counted].cpu()
    clipped = ops.per_response(result.clipped.float(), mask)[:, 0][counted].cpu()
    index = bin_index(lengths, bin_edges(lengths))
    positive = torch.where(mask, advantages, 0.0).sum(1)[counted].cpu() > 0
    sides = [positive.logical_not(), positive]
    count = torch.stack([bin_sums(index, side) for side in sides], -1)
    weights = LengthWeights.of(count, torch.stack([bin_sums(index, clipped * side) for side in sides], -1))
    number, cut = count.sum(-1), bin_sums(index, clipped)
    metrics = {
        "clip/fraction": float(clipped.mean()),
        "fairness/lre_max": float((weights.conditional - 1).abs().max()),
    }
    present = [k for k in range(len(number)) if number[k] > 0]
    return metrics | {f"clip/fraction_length_bin_{k}": float(cut[k] / number[k]) for k in present}
