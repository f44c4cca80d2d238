"""Holds a policy to every law, and finds the smallest input that shows a failure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from rlzoo.policy import ClipPolicy
from rlzoo.testing.data import map_tensors, map_tokens
from rlzoo.testing.laws import LAWS, Law, rows_of
from rlzoo.types import ClipInputs

MAX_TRIALS = 300  # shrinking stops here; a trial takes about a millisecond


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one policy fared on one law.

    Example:
        ``Outcome(law="zero_advantage_zero_gradient", status="opted out", detail="adds a penalty")``
    """

    law: str
    status: Literal["pass", "fail", "opted out"]
    detail: str = ""  # why it failed, or the reason for opting out
    inputs: ClipInputs | None = None  # the smallest inputs found on which it fails, where inputs matter


def check(policy: ClipPolicy) -> list[Outcome]:
    """Hold one policy to every law, without pytest; in the order of `LAWS`."""
    return [_outcome(policy, law) for law in LAWS]


def _outcome(policy: ClipPolicy, law: Law) -> Outcome:
    if law.name in policy.exempt:
        return Outcome(law.name, "opted out", policy.exempt[law.name])
    try:
        inputs = law.example(policy)
    except Exception as error:  # a policy that raises has failed the law, whatever it raises
        return Outcome(law.name, "fail", _describe(error))
    failure = _failure(policy, law, inputs)
    if failure is None:
        return Outcome(law.name, "pass")
    if not law.shrinks:
        return Outcome(law.name, "fail", failure)
    smallest = shrink(inputs, lambda candidate: _kind(_failure(policy, law, candidate)) == _kind(failure))
    return Outcome(law.name, "fail", _failure(policy, law, smallest) or failure, smallest)


def _failure(policy: ClipPolicy, law: Law, inputs: ClipInputs) -> str | None:
    try:
        law(policy, inputs)
    except Exception as error:  # as above
        return _describe(error)
    return None


def _describe(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return text if isinstance(error, AssertionError) else f"{type(error).__name__}: {text}"


def _kind(failure: str | None) -> str | None:
    """A failure without its numbers, so that the same one is known on smaller inputs."""
    return None if failure is None else re.sub(r"\d+", "", failure.partition(":")[0])


def shrink(inputs: ClipInputs, still_fails: Callable[[ClipInputs], bool]) -> ClipInputs:
    """Smaller inputs that still fail: fewer rows, then fewer tokens, then rounder numbers."""
    trials, progress = 0, True
    while progress:
        progress = False
        for candidate in _smaller(inputs):
            trials += 1
            if trials > MAX_TRIALS:
                return inputs
            if still_fails(candidate):
                inputs, progress = candidate, True
                break
    return inputs


def _smaller(inputs: ClipInputs) -> Iterator[ClipInputs]:
    """Candidates a step smaller, the boldest first; one that leaves a response without a token shows nothing."""
    yield from (candidate for candidate in _cut(inputs) if bool(candidate.response_mask.any(dim=-1).all()))


def _cut(inputs: ClipInputs) -> Iterator[ClipInputs]:
    for dimension, part in ((0, rows_of), (1, _columns)):
        size = inputs.log_probs.shape[dimension]
        chunk = size // 2
        while chunk:
            for start in range(0, size, chunk):
                keep = [index for index in range(size) if not start <= index < start + chunk]
                if keep:
                    yield part(inputs, keep)
            chunk //= 2
    for digits in (0, 1, 2):
        rounded = map_tokens(inputs, partial(torch.round, decimals=digits))
        rounded = dataclasses.replace(rounded, advantages=rounded.advantages.round(decimals=digits))
        if not _same(rounded, inputs):
            yield rounded


def _columns(inputs: ClipInputs, columns: list[int]) -> ClipInputs:
    return map_tensors(inputs, lambda values: values[:, columns] if values.shape[-1] > 1 else values)


def _same(first: ClipInputs, second: ClipInputs) -> bool:
    names = ("log_probs", "old_log_probs", "advantages")
    return all(bool((getattr(first, name) == getattr(second, name)).all()) for name in names)
