"""What the integrations share: a rule from a name and settings, what a trainer cannot give it, and clip decisions by length."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError

from rlzoo import ops
from rlzoo.errors import UserError, explain, shown
from rlzoo.fairness import bin_index, bin_sums
from rlzoo.support.parsing import UnreadableError, parse_yaml
from rlzoo.zoo import Zoo, load_zoo

if TYPE_CHECKING:
    from torch import Tensor

    from rlzoo.policy import ClipPolicy
    from rlzoo.types import ClipResult

PREFIX = "rlzoo:"
"""What the names of rules and estimators begin with in the registries of other trainers."""
LENGTH_EDGES = (1.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 2.0**40)
"""Length bins in tokens where a trainer shows a rule one micro-batch at a time: up to 64, 65 to 256, ..., above 16,384."""


@functools.cache
def installed() -> Zoo:
    """The installed plugins, loaded once in a process."""
    return load_zoo()


def parse(name: str) -> tuple[str, dict[str, Any]]:
    """Split a name with settings, such as ``"rlzoo:fspo/width_low:0.02/width_high:0.1"``.

    No character of it has to be quoted in a shell, in YAML or in an override of Hydra. Values are read as YAML.

    Raises:
        UserError: a setting is not ``key:value``.

    Example:
        >>> parse("rlzoo:fspo/width_low:0.02")
        ('fspo', {'width_low': 0.02})
    """
    bare, *settings = name.removeprefix(PREFIX).split("/")
    given: dict[str, Any] = {}
    for setting in settings:
        key, colon, value = setting.partition(":")
        if not (key and colon and value) or key in given:
            example = f"{PREFIX}fspo/width_low:0.02/width_high:0.1"
            raise UserError(f"{shown(name)}: settings follow the name as /key:value, each once, such as {example}")
        try:
            given[key] = parse_yaml(value)
        except UnreadableError as error:
            raise UserError(f"{shown(name)}: {key}={shown(value)} cannot be read: {error}") from error
    return bare, given


def rule(name: str, /, instead: Mapping[str, str] | None = None, **settings: Any) -> ClipPolicy:
    """Make an installed rule.

    Args:
        name: of the rule, with or without settings: ``"fspo"``, ``"rlzoo:fspo/width_low:0.02"``.
        instead: fields of the rule that the trainer decides on, each with the setting of the trainer to use in its place.
        **settings: of the rule, such as ``width_low=0.02``.

    Raises:
        UserError: unknown rule, or unknown or wrong setting.

    Example:
        >>> rule("fspo", width_low=0.02).width_low
        0.02
    """
    bare, given = parse(name)
    given |= settings
    for field, setting in (instead or {}).items():
        if field in given:
            raise UserError(f"{PREFIX}{bare}/{field}:{given[field]} would be ignored here; set {setting}")
    kind = installed()[bare]
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise UserError(explain(error, kind, f"{PREFIX}{bare}/")) from error


def check_supported(policy: ClipPolicy, trainer: str, given: Iterable[str] = ()) -> None:
    """Refuse a rule that would not do in a trainer what it does here.

    Args:
        policy: the rule.
        trainer: its name, for errors.
        given: the fields of `ClipInputs` that the trainer's integration can fill, of `rlzoo.policy.NEEDS`.

    Raises:
        UserError: says what the rule lacks there.
    """
    if policy.is_adaptive:
        raise UserError(f"{policy.name} changes its band from update to update, and {trainer} keeps no such state")
    if missing := sorted(policy.needs - set(given)):
        raise UserError(f"{policy.name} needs {', '.join(missing)}, which {trainer} does not give to a loss")


def per_response(values: Tensor, response_mask: Tensor, what: str) -> Tensor:
    """The ``(B, 1)`` column of a ``(B, T)`` tensor that holds one value in every response.

    Args:
        values: ``(B, T)``; what it holds on masked positions does not matter.
        response_mask: ``(B, T)`` bool.
        what: the values are, for errors.

    Raises:
        UserError: the values differ between the tokens of a response.
    """
    column = values.gather(1, response_mask.int().argmax(1, keepdim=True))
    if not torch.equal(torch.where(response_mask, values, column), column.expand_as(values)):
        raise UserError(f"{what} differ between the tokens of a response: its objective is per response")
    return column


def clipped_by_length(result: ClipResult, advantages: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Number of responses, and the sum of their clip decisions, in each of the bins of `LENGTH_EDGES`.

    Only responses with an advantage other than 0 count; a token rule's response counts with its share of clipped tokens.

    Args:
        result: what the rule answered.
        advantages: ``(B, 1)`` or ``(B, T)``.
        response_mask: ``(B, T)`` bool.

    Returns:
        Two float64 tensors ``(6,)``.
    """
    clipped = ops.per_response(result.clipped.float(), response_mask)[:, 0].cpu()
    counted = (torch.where(response_mask, advantages, 0.0) != 0).any(1).cpu()
    lengths = response_mask.sum(1).cpu()[counted]
    index, size = bin_index(lengths, torch.tensor(LENGTH_EDGES)), len(LENGTH_EDGES) - 1
    return bin_sums(index, torch.ones_like(lengths), size), bin_sums(index, clipped[counted], size)
