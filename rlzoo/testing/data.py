"""Creates example inputs for the laws: ragged, off-policy data that includes responses with zero advantage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlzoo.core import ops
from rlzoo.core.policy import ClipPolicy, ClipStats, limited_to_needs
from rlzoo.core.types import ClipInputs, ClipResult
from rlzoo.testing.reach import Branch, branches

TOKEN_FIELDS = ("log_probs", "old_log_probs", "rollout_log_probs", "old_entropy", "ref_log_probs")
INTEGER_TOKEN_FIELDS = ("turn_ids", "token_ids")
ROW_FIELDS = ("group_ids", "rewards", "finished")
ALL_FIELDS = (*TOKEN_FIELDS, "advantages", "response_mask", *INTEGER_TOKEN_FIELDS, *ROW_FIELDS)
GROUP, TURN = 6, 8  # number of responses per prompt and of tokens per turn
Change = Callable[[Tensor], Tensor]


def off_policy_inputs(policy: ClipPolicy, seed: int = 0, num_responses: int = 24, max_length: int = 40) -> ClipInputs:
    """Return ragged data in which every sixth advantage is 0 and the policy clips 10 to 40% of the responses with A != 0.

    A search with this policy finds the spread of the token log-ratios. For a policy that never clips, the spread is 0.1.
    """
    with_spread = partial(ragged_inputs, policy, seed=seed, num_responses=num_responses, max_length=max_length)
    key = (*_key(policy), seed, num_responses, max_length)
    if key not in SPREADS:
        SPREADS[key] = _searched_spread(policy, with_spread)
    return with_spread(SPREADS[key])


def ragged_inputs(
    policy: ClipPolicy, spread: float = 0.3, seed: int = 0, num_responses: int = 24, max_length: int = 40
) -> ClipInputs:
    """Return ragged data whose token log-ratios have the given spread, without calling the policy."""
    rng = torch.Generator().manual_seed(seed)
    length = torch.randint(1, max_length + 1, (num_responses, 1), generator=rng)
    length[0] = max_length
    mask = torch.arange(max_length) < length
    noise = torch.randn(num_responses, max_length, generator=rng)
    old_log_probs = -torch.rand(num_responses, max_length, generator=rng) - 0.05
    advantages = torch.randn(num_responses, 1, generator=rng)
    advantages[::6] = 0
    rollout = old_log_probs + 0.001 * noise
    return filled(policy, ClipInputs(old_log_probs + spread * noise, old_log_probs, advantages, mask, rollout))


SPREADS: dict[tuple[Any, ...], float] = {}
REACHING: dict[tuple[Any, ...], list[ClipInputs]] = {}
"""Spreads and `reaching_inputs` by policy, which are cached because all laws start from the same inputs."""


def _key(policy: ClipPolicy) -> tuple[Any, ...]:
    return (type(policy), repr(policy.model_dump()))  # not the policy itself, which may be mutable


def _searched_spread(policy: ClipPolicy, with_spread: Callable[[float], ClipInputs]) -> float:
    """Return a spread at which 10 to 40% of the responses are clipped, or 0.1 if there is none."""
    # start with a moderate spread, because a rule that looks only at signs clips the same share at any spread
    spread, low, high = 0.1, 1e-6, 8.0
    for _ in range(40):
        fraction = clip_fraction(policy, with_spread(spread))
        if 0.2 <= fraction <= 0.3:
            break
        low, high = (spread, high) if fraction < 0.2 else (low, spread)
        spread = (low * high) ** 0.5
    return spread if 0.1 <= clip_fraction(policy, with_spread(spread)) <= 0.4 else 0.1


def on_policy_inputs(policy: ClipPolicy) -> ClipInputs:
    """Return `off_policy_inputs` at ratio 1, where every log-probability is the same as at sampling time."""
    return at_ratio_1(off_policy_inputs(policy))


def at_ratio_1(inputs: ClipInputs) -> ClipInputs:
    """Return the inputs with every log-probability set to its value at sampling time."""
    return replace(inputs, log_probs=inputs.old_log_probs, rollout_log_probs=inputs.old_log_probs)


def extreme_inputs(policy: ClipPolicy) -> ClipInputs:
    """Return 4096-token responses for every sign of A, with log-ratios of +-100 on all tokens or only on the first."""
    shift = torch.zeros(12, 4096)
    shift[0:3], shift[3:6] = 100.0, -100.0
    shift[6:9, 0], shift[9:12, 0] = 100.0, -100.0
    old = -1 - shift.clamp(min=0)  # no log-prob is above 0
    advantages = torch.tensor([1.0, 0.0, -1.0]).repeat(4)[:, None]
    return filled(policy, ClipInputs(old + shift, old, advantages, torch.ones_like(shift, dtype=torch.bool), old))


def moved(inputs: ClipInputs, factor: float) -> ClipInputs:
    """Return the inputs with every token's log-ratio multiplied by a factor."""
    return replace(inputs, log_probs=inputs.old_log_probs + factor * (inputs.log_probs - inputs.old_log_probs))


def uniform_inputs(policy: ClipPolicy, log_ratios: Sequence[float], length: int, advantage: float) -> ClipInputs:
    """Return one response per log-ratio, all of the same length. All tokens of a response have its log-ratio."""
    shift = torch.tensor(log_ratios, dtype=torch.float32)[:, None].expand(-1, length)
    old = torch.full((len(log_ratios), length), -4.0)  # low enough that the probability can rise
    advantages = torch.full((len(log_ratios), 1), advantage)
    inputs = filled(policy, ClipInputs(old + shift, old, advantages, torch.ones_like(old, dtype=torch.bool), old))
    # use a single group, so that per-group values are the same for all rows
    return map_tensors(map_tensors(inputs, torch.zeros_like, ("group_ids",)), torch.ones_like, ("finished",))


def wild_inputs(policy: ClipPolicy, seed: int, num_responses: int = 24, max_length: int = 40) -> ClipInputs:
    """Return ragged inputs with gaps; all values that a rule may read vary widely. Some ranges depend on the seed.

    Token log-ratios have a spread of 0.03 to 3 nats. Token probabilities reach 0 and 1. Sampler and trainer differ by up to a
    nat. Groups have 1 to about 8 rows, turns have 1 to about 16 tokens, entropies are 0 to about 10 nats, and rewards are -1
    to 3.
    """
    rng = torch.Generator().manual_seed(seed)
    rows, shape, size = (num_responses, 1), (num_responses, max_length), (0.3, 3.0, 0.03)[seed % 3]

    def normal() -> Tensor:
        return torch.randn(shape, generator=rng)

    def uniform(shape: tuple[int, int]) -> Tensor:
        return torch.rand(shape, generator=rng)

    mask = torch.arange(max_length) < 1 + uniform(rows) * max_length
    mask[0], mask[1:, 1] = True, False
    old = torch.where(uniform(shape) < 0.1, 0.0, -(1.5 * normal()).exp())
    moved, sampled = (torch.where(old + gap > 0, old - gap, old + gap) for gap in (size * normal(), 0.3 * normal()))
    advantages = torch.where(torch.arange(num_responses)[:, None] % 6 == 5, 0.0, (1.0, 1.0, 5.0)[seed % 3] * normal()[:, :1])
    place, values = mask.cumsum(dim=-1) - 1, optional_fields(ClipInputs(moved, old, advantages, mask))
    values["group_ids"] = (uniform(rows) < 0.3).long().cumsum(dim=0)
    values["turn_ids"] = torch.where(mask, ((uniform(shape) < 0.25) & mask & (place > 0)).long().cumsum(dim=-1), -1)
    values["old_entropy"] = torch.where(mask, normal().exp().floor() * uniform(shape), 0.0)
    values["ref_log_probs"] = torch.where(uniform(shape) < 0.3, old, torch.where(mask, old - normal().abs(), 0.0))
    values["rewards"] = torch.tensor([-1.0, 0.0, 0.5, 1.0, 3.0])[(5 * uniform(rows)).long()]
    values["token_ids"] = torch.where(mask, (200 * uniform(shape)).long(), 0)
    values["finished"], values["max_length"] = uniform(rows) < 0.5, (1 + seed % 2) * max_length
    values["progress"] = (0.0, 0.5, 0.99)[seed % 3]
    inputs = ClipInputs(moved, old, advantages, mask, old if seed % 3 == 2 else sampled)
    return replace(inputs, **{name: values[name] for name in policy.needs})


def reaching_inputs(policy: ClipPolicy) -> list[ClipInputs]:
    """Return inputs on which the rule's comparisons have the outcomes that do not occur on `off_policy_inputs`."""
    if (key := _key(policy)) not in REACHING:
        wild = (wild_inputs(policy, seed) for seed in range(9))
        long, equal = wild_inputs(policy, 9, num_responses=3, max_length=4096), uniform_inputs(policy, [0.0, 0.0], 1, 1.0)
        seen, REACHING[key] = set[tuple[str, str]](), []
        for index, inputs in enumerate((off_policy_inputs(policy), *wild, long, equal)):
            passed = branches(partial(answer, policy), [inputs])
            sides = {(branch.where, side) for branch in passed for side in ("true", "false") if getattr(branch, side)}
            if index == 1 or (index and sides - seen):
                REACHING[key].append(inputs)
            seen |= sides
    return REACHING[key]


def passed_branches(policy: ClipPolicy) -> list[Branch]:
    """Return the rule's branches, and how often the laws' examples take each one."""
    passed = branches(partial(answer, policy), [off_policy_inputs(policy), *reaching_inputs(policy)])
    return [branch for branch in passed if not branch.masks]  # omit branches that only reproduce the mask


def filled(policy: ClipPolicy | type[ClipPolicy], inputs: ClipInputs) -> ClipInputs:
    """Add the fields that the policy needs, with groups of 6 rows, turns of 8 tokens, and reward 1 where A > 0, else 0."""
    values = optional_fields(inputs)
    return replace(inputs, **{name: values[name] for name in policy.needs})


def optional_fields(inputs: ClipInputs) -> dict[str, Any]:
    """Return a value for each field that a policy may need; see `filled`."""
    mask, row = inputs.response_mask, torch.arange(len(inputs.response_mask))[:, None]
    place = mask.cumsum(dim=-1) - 1
    tokens = torch.where(mask, inputs.old_log_probs, 0.0)
    return {
        "group_ids": row // GROUP,
        "turn_ids": torch.where(mask, place // TURN, -1),
        "old_entropy": -tokens,
        "ref_log_probs": tokens,
        "rewards": (inputs.advantages.sum(dim=-1, keepdim=True) > 0).float(),
        "token_ids": torch.where(mask, place, 0),
        "finished": row % 3 > 0,
        "max_length": mask.shape[-1],
        "progress": 0.5,
    }


def clip_fraction(policy: ClipPolicy, inputs: ClipInputs, sign: int | None = None) -> float:
    """Return the clipped share of the responses with A != 0, or of those with one sign of A.

    Each response contributes its share of clipped tokens.
    """
    clipped = ops.per_response(answer(policy, inputs).clipped.float(), inputs.response_mask)[:, 0]
    rows = (inputs.advantages != 0 if sign is None else inputs.advantages.sign() == sign).any(dim=-1)
    return float(clipped[rows].mean()) if bool(rows.any()) else 0.0


def answer(policy: ClipPolicy, inputs: ClipInputs) -> ClipResult:
    """Return the policy's result on copies of the inputs, so that the caller's inputs stay unchanged.

    Raises:
        AssertionError: the result is not a `ClipResult` or has a shape that no scope allows.
    """
    return _well_formed(call(policy, fresh(inputs)), inputs)


def call(policy: ClipPolicy, inputs: ClipInputs) -> ClipResult:
    """Return the policy's result. The policy can read only the optional inputs that it names in `needs`."""
    return policy(limited_to_needs(policy, inputs))


def _well_formed(result: ClipResult, inputs: ClipInputs) -> ClipResult:
    """Check that the laws can handle the shapes of a result, and return the result with ``clipped`` converted to bool."""
    assert isinstance(result, ClipResult), f"the result is a {type(result).__name__}, not a ClipResult"
    size, max_length = inputs.log_probs.shape
    shapes = {(size, max_length): None, (size, 1): None}
    for name in ("objective", "log_ratio", "clipped"):
        values = getattr(result, name)
        assert isinstance(values, Tensor), f"{name} is a {type(values).__name__}, not a tensor"
        got = tuple(values.shape)
        assert got in shapes, f"{name} has shape {got}; for these log-probs it must be {' or '.join(map(str, shapes))}"
    return result if result.clipped.dtype == torch.bool else replace(result, clipped=result.clipped.bool())


def evaluate(policy: ClipPolicy, inputs: ClipInputs) -> tuple[ClipResult, Tensor]:
    """Return the policy's result and ``d objective.sum() / d log_probs``, float32 ``(B, T)``, over unmasked positions.

    The policy receives copies, as in `answer`.

    Raises:
        AssertionError: the objective does not depend on ``log_probs``, or the result has a shape that no scope allows.
    """
    copies = fresh(inputs)
    log_probs = copies.log_probs.requires_grad_()
    result = _well_formed(call(policy, copies), inputs)
    assert result.objective.requires_grad, "the objective does not depend on log_probs: there is nothing to learn from"
    gradient = torch.autograd.grad(visible(result.objective, inputs).sum(), log_probs)[0]
    return result, gradient.float()


def fresh(inputs: ClipInputs) -> ClipInputs:
    """Return a copy of the inputs that shares no memory with the originals."""
    return map_tensors(inputs, lambda values: values.detach().clone())


def visible(values: Tensor, inputs: ClipInputs) -> Tensor:
    """Return per-response values unchanged and per-token values only where the mask is True."""
    return values if values.shape[-1] == 1 else values[inputs.response_mask]


def clip_stats(inputs: ClipInputs, result: ClipResult) -> ClipStats:
    """Return the statistics that the learner would pass to `ClipPolicy.updated` for these inputs, in two length bins."""
    length = inputs.response_mask.sum(dim=-1).float()
    edges = torch.stack([length.min(), length.median(), length.max()])
    keep = (inputs.advantages != 0).any(dim=-1)
    judged = (ops.per_response(values.float(), inputs.response_mask)[:, 0] for values in (result.clipped, result.log_ratio))
    columns = (length, inputs.advantages.sum(dim=-1), *judged)
    return ClipStats.of(edges, *(column[keep] for column in columns))


def map_tensors(inputs: ClipInputs, change: Change, names: Sequence[str] = ALL_FIELDS) -> ClipInputs:
    """Return the inputs with ``change`` applied to the named tensors, or to all tensors by default."""
    tensors = {name: getattr(inputs, name) for name in names}
    changed: dict[str, Any] = {name: change(value) for name, value in tensors.items() if value is not None}
    return replace(inputs, **changed)
