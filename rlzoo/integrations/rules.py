"""Code that the integrations share to parse rules, check what a trainer supports, and count clip decisions by length."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from rlzoo.config.composition import config_names, named_settings, read_config
from rlzoo.core import ops
from rlzoo.core.errors import UserError, explain, shown
from rlzoo.core.fairness import bin_index, bin_sums
from rlzoo.core.policy import ClipPolicy
from rlzoo.core.types import ClipResult
from rlzoo.core.zoo import Zoo, load_zoo
from rlzoo.support.parsing import UnreadableError, parse_yaml

PREFIX = "rlzoo:"
"""Prefix of rules and estimators in other trainers' registries."""
LENGTH_EDGES = (1.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 2.0**40)
"""Length bins in tokens for trainers that pass one micro-batch at a time: up to 64, 65 to 256, ..., above 16,384."""


@functools.cache
def installed() -> Zoo:
    """Return the installed plugins, which are loaded once per process."""
    return load_zoo()


def parse(name: str) -> tuple[str, dict[str, Any]]:
    """Split a string such as ``"rlzoo:my-rule/width_low:0.02/width_high:0.1"`` into a rule's name and its settings.

    The string needs no quoting in a shell, in YAML or in a Hydra override. Values are parsed as YAML.

    Raises:
        UserError: a setting does not have the form ``key:value``.

    Example:
        >>> parse("rlzoo:my-rule/width_low:0.02")
        ('my-rule', {'width_low': 0.02})
    """
    bare, *settings = name.removeprefix(PREFIX).split("/")
    values: dict[str, Any] = {}
    for setting in settings:
        key, colon, value = setting.partition(":")
        if not (key and colon and value) or key in values:
            form = f"{PREFIX}NAME/KEY:VALUE/KEY:VALUE"
            raise UserError(f"{shown(name)}: expected /key:value settings after the name, each key at most once, as in {form}")
        try:
            values[key] = parse_yaml(value)
        except UnreadableError as error:
            raise UserError(f"{shown(name)}: {key}={shown(value)} cannot be read: {error}") from error
    return bare, values


def rule(name: str, /, instead: Mapping[str, str] | None = None, **settings: Any) -> ClipPolicy:
    """Create an installed rule.

    Args:
        name: name of the rule, with or without settings, such as ``"my-rule"`` or ``"rlzoo:my-rule/width_low:0.02"``.
        instead: maps each field that the trainer determines to the trainer's corresponding setting.
        **settings: settings of the rule, such as ``width_low=0.02``.

    Raises:
        UserError: the rule is unknown, or a setting is unknown or invalid.
    """
    bare, values = parse(name)
    prefix = PREFIX if name.startswith(PREFIX) else ""
    values |= settings
    for field, setting in (instead or {}).items():
        if field in values:
            raise UserError(f"{prefix}{bare}/{field}:{values[field]} would be ignored; set {setting}")
    if bare not in installed() and bare in config_names():
        words = named_settings("clip", read_config(bare).get("clip"))
        keys = [key for key in words if key not in {"name", *(instead or {})}]
        usable = [words["name"], *(f"{key}:{'null' if words[key] is None else words[key]}" for key in keys)]
        raise UserError(f"{bare!r} is a config, not a rule; its rule is {prefix}{'/'.join(usable)}")
    kind = installed()[bare]
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise UserError(explain(error, kind, f"{prefix}{bare}/")) from error


def check_supported(policy: ClipPolicy, trainer: str, provided: Iterable[str] = ()) -> None:
    """Reject a rule that would not behave in a trainer as it does in rlzoo.

    Args:
        policy: the rule.
        trainer: name of the trainer, for error messages.
        provided: fields of `ClipInputs` listed in `rlzoo.core.types.NEEDS` that the integration can fill.

    Raises:
        UserError: the rule needs something that the trainer does not provide; the message names it.
    """
    if policy.is_adaptive:
        raise UserError(f"{policy.name} adapts its band after every update, but {trainer} keeps no state for it")
    if missing := sorted(policy.needs - set(provided)):
        raise UserError(f"{policy.name} needs {', '.join(missing)}, which {trainer} does not pass to a loss")


def check_estimator(policy: ClipPolicy, trainer: str, provided: Iterable[str] = ()) -> None:
    """Reject a rule whose estimator needs more than rewards and ``provided`` inputs, if the trainer computes the advantages.

    Raises:
        UserError: the estimator needs something else, such as the log-probs of a teacher; the message names it.
    """
    estimators, wanted = installed().advantages, policy.advantage
    name = wanted if isinstance(wanted, str) else str(wanted.get("name"))
    if name in estimators and (missing := sorted(estimators[name].needs - set(provided))):
        raise UserError(
            f"{policy.name} is meant for {name} advantages, which need {', '.join(missing)}, but {trainer} computes advantages "
            f"from rewards alone; use rlzoo train --clip {policy.name}"
        )


def one_per_response(values: Tensor, response_mask: Tensor, what: str) -> Tensor:
    """Reduce a ``(B, T)`` tensor with one value per response to a ``(B, 1)`` column.

    Args:
        values: ``(B, T)``; values at masked positions are ignored.
        response_mask: ``(B, T)`` bool.
        what: description of the values, for error messages.

    Raises:
        UserError: the values differ between the tokens of a response.
    """
    column = values.gather(1, response_mask.int().argmax(1, keepdim=True))
    if not torch.equal(torch.where(response_mask, values, column), column.expand_as(values)):
        raise UserError(f"{what} differ between the tokens of a response, but the objective is per response")
    return column


def clipped_by_length(result: ClipResult, advantages: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of responses and the sum of their clip decisions in each bin of `LENGTH_EDGES`.

    Only responses with a nonzero advantage are counted. If the rule clips tokens, a response contributes its share of clipped
    tokens.

    Args:
        result: result of the rule.
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
