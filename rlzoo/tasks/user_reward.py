"""A reward function of the user's own, found by its ``module:function`` name."""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Callable
from pathlib import Path

from rlzoo.errors import UserError, did_you_mean, shown
from rlzoo.types import Problem

RewardFunction = Callable[[Problem, str], float]


def import_reward(reference: str) -> RewardFunction:
    """The function that ``module:function`` names, looked for in the current directory too.

    Raises:
        UserError: the module or function is not found, or cannot be called with (problem, response).
    """
    key = f"task.reward={shown(reference)}"
    module_name, _, function_name = reference.partition(":")
    parts = [*module_name.split("."), function_name]
    if not all(part.isidentifier() for part in parts) or module_name.endswith(".py"):
        raise UserError(f"{key}: must look like module:function, for example my_rewards:exact_match")
    here = str(Path.cwd())
    if here not in sys.path:  # an installed command, unlike python -m, does not look in the current directory
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module does at import
        raise UserError(f"{key}: cannot import {module_name!r} from {here} or the installed packages: {error}") from error
    function = getattr(module, function_name, None)
    if function is None:
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise UserError(f"{key}: {module_name} has no {function_name!r}{did_you_mean(function_name, names)}")
    if not callable(function):
        raise UserError(f"{key}: is a {type(function).__name__}, not a function (problem, response) -> float")
    try:
        inspect.signature(function).bind(Problem("", ""), "")
    except (TypeError, ValueError) as error:
        raise UserError(f"{key}: must take (problem, response): {error}") from error
    accepted: RewardFunction = function
    return accepted


def checked_reward(value: object, reference: str | None) -> float:
    """What the user's reward returned, as a float.

    Raises:
        UserError: it is not a finite number.
    """
    number = math.nan
    if hasattr(value, "__float__"):  # numbers, and one-element arrays and tensors; not strings
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            number = math.nan
    if not math.isfinite(number):
        raise UserError(f"task.reward={reference!r}: returned {shown(value)}, not a finite number")
    return number
