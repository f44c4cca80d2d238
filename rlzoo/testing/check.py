"""Checks a rule, an estimator or a correction against its laws and finds the smallest input that shows a failure."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from rlzoo.core.advantages import AdvantageEstimator
from rlzoo.core.corrections import Correction
from rlzoo.core.policy import ClipPolicy
from rlzoo.core.types import NEEDS, ClipInputs
from rlzoo.testing.data import TOKEN_FIELDS, answer, map_tensors, passed_branches
from rlzoo.testing.laws import LAWS, Law, LawError, first_line
from rlzoo.testing.parts import ADVANTAGE_LAWS, CORRECTION_LAWS, component_examples
from rlzoo.testing.reach import Branch, branches

Checked = ClipPolicy | AdvantageEstimator | Correction
MAX_TRIALS = 300  # maximum number of trials when shrinking; a trial takes about a millisecond


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of checking one policy against one law."""

    law: str
    status: Literal["pass", "fail", "opted out"]
    detail: str = ""  # the reason for the failure or for opting out
    inputs: ClipInputs | None = None  # the smallest failing inputs found, if the failure depends on inputs


def laws_for(policy: Checked) -> tuple[Law, ...]:
    """Return the laws for a rule, an estimator or a correction."""
    if isinstance(policy, ClipPolicy):
        return LAWS
    return ADVANTAGE_LAWS if isinstance(policy, AdvantageEstimator) else CORRECTION_LAWS


def check(policy: Checked) -> list[Outcome]:
    """Check a rule, an estimator or a correction against its laws without pytest. A failure often causes further failures."""
    return [_outcome(policy, law) for law in laws_for(policy)]


def reached(component: Checked) -> list[Branch]:
    """Return the branches of a rule, an estimator or a correction, and how often the examples of its laws take them."""
    if isinstance(component, ClipPolicy):
        return passed_branches(component)
    return [branch for branch in branches(component, component_examples(component)) if not branch.masks]


def inputs_read(policy: Checked, inputs: ClipInputs) -> dict[str, Any]:
    """Return the inputs, by name, that can change a rule's result, other than log-ratios, advantages and the mask."""
    names = [name for name in NEEDS if getattr(inputs, name) is not None]
    if isinstance(policy, ClipPolicy):
        result, log_ratio, old = answer(policy, inputs).objective, inputs.log_probs - inputs.old_log_probs, inputs.old_log_probs
        levels = [
            replace(inputs, log_probs=factor * old + log_ratio, old_log_probs=factor * old) for factor in (0.1, 0.5, 2, 8)
        ]
        others = {"old_log_probs": levels, "rollout_log_probs": [replace(inputs, rollout_log_probs=old - 1)]}
        for name, changed in others.items():
            if not all(torch.allclose(answer(policy, other).objective, result, 1e-3, 1e-5, True) for other in changed):
                names.append(name)
    return {name: value for name in sorted(names) if (value := getattr(inputs, name)) is not None}


def parametrize_with_checks(policies: Sequence[Checked]) -> Callable[..., None]:
    """Return a pytest test function with one case per policy and law, omitting the laws that a policy opts out of."""
    import pytest

    cases = [(policy, law) for policy in policies for law in laws_for(policy) if law.name not in policy.exempt]

    @pytest.mark.parametrize(("policy", "law"), cases, ids=[f"{policy.name}-{law.name}" for policy, law in cases])
    def test_policy_keeps_the_laws(policy: Checked, law: Law) -> None:
        law(policy)

    return test_policy_keeps_the_laws


def _outcome(policy: Checked, law: Law) -> Outcome:
    if law.name in policy.exempt:
        return Outcome(law.name, "opted out", policy.exempt[law.name])
    try:
        failures = ((inputs, law.failure(policy, inputs)) for inputs in law.examples(policy))
        inputs, failure = next((pair for pair in failures if pair[1] is not None), (None, None))
    except Exception as error:  # creating the examples calls the policy; any exception fails the law
        return Outcome(law.name, "fail", _describe(error, policy))
    if failure is None:
        return Outcome(law.name, "pass")
    shown = failure.inputs if isinstance(failure, LawError) else None
    if law.shrinks and inputs is not None:
        smallest = shrink(shown or inputs, lambda candidate: _kind(law.failure(policy, candidate)) == _kind(failure))
        failure = law.failure(policy, smallest) or failure
        shown = failure.inputs if isinstance(failure, LawError) else smallest
    return Outcome(law.name, "fail", _describe(failure, policy), shown)


def _describe(error: Exception, policy: Checked) -> str:
    text = first_line(error)
    if isinstance(error, AssertionError):
        return text
    file = sys.modules[type(policy).__module__].__file__
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f" ({Path(file).name} line {lines[-1]})" if file and lines else ""
    return f"{text}{where}"


def _kind(error: Exception | None) -> str | None:
    """Return a failure's message without its numbers so that the same failure can be recognised on smaller inputs."""
    return None if error is None else type(error).__name__ + re.sub(r"\d+", "", first_line(error).partition(":")[0])


def shrink(inputs: ClipInputs, still_fails: Callable[[ClipInputs], bool]) -> ClipInputs:
    """Return smaller inputs that still fail, with fewer rows, fewer tokens and rounder numbers, in this order."""
    trials = 0
    for dimension in (0, 1):
        chunk = inputs.log_probs.shape[dimension] // 2
        while chunk:
            start = 0
            while start < inputs.log_probs.shape[dimension] and trials < MAX_TRIALS:
                trials += 1
                smaller = _without(inputs, dimension, range(start, start + chunk))
                has_tokens = smaller.response_mask.numel() and smaller.response_mask.any(dim=-1).all()
                if has_tokens and still_fails(smaller):  # a response without tokens shows nothing
                    inputs = smaller
                else:
                    start += chunk
            chunk //= 2
    for digits in (0, 1, 2):
        rounded = map_tensors(inputs, partial(torch.round, decimals=digits), (*TOKEN_FIELDS, "advantages"))
        if still_fails(rounded):
            return rounded
    return inputs


def _without(inputs: ClipInputs, dimension: int, left_out: range) -> ClipInputs:
    """Return the inputs without some of their rows (dimension 0) or tokens (dimension 1)."""
    size = inputs.log_probs.shape[dimension]
    keep = torch.tensor([index for index in range(size) if index not in left_out], dtype=torch.long)
    return map_tensors(
        inputs, lambda values: values.index_select(dimension, keep) if values.shape[dimension] == size else values
    )
