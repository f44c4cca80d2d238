"""Code of the user's own, found by its ``module:name``, in the current directory too."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rlzoo.errors import UserError, did_you_mean, shown
from rlzoo.tasks.grading import Grader
from rlzoo.types import Problem

RewardFunction = Callable[[Problem, str], float]


def import_named(setting: str, reference: str, form: str) -> Any:
    """What ``module:name`` names.

    Args:
        setting: the setting that holds the reference, for errors.
        reference: ``module:name``; the module may have dots.
        form: how it must look, with an example, for errors.

    Raises:
        UserError: it does not look like that, or the module or the name is not found.
    """
    key = f"{setting}={shown(reference)}"
    module_name, _, name = reference.partition(":")
    parts = [*module_name.split("."), name]
    if not all(part.isidentifier() for part in parts) or module_name.endswith(".py"):
        raise UserError(f"{key}: must look like {form}")
    here = str(Path.cwd())
    if here not in sys.path:  # an installed command, unlike python -m, does not look in the current directory
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the user's module does at import
        reason = f"it exits when it is imported ({error!r})" if isinstance(error, SystemExit) else error
        raise UserError(f"{key}: cannot import {module_name!r} from {here} or the installed packages: {reason}") from error
    found = getattr(module, name, None)
    if found is None:
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise UserError(f"{key}: {module_name} has no {name!r}{did_you_mean(name, names)}")
    return found


def import_reward(reference: str) -> RewardFunction:
    """The function that ``module:function`` names, looked for in the current directory too.

    Raises:
        UserError: the module or function is not found, or cannot be called with (problem, response).
    """
    function = import_named("task.reward", reference, "module:function, for example my_rewards:exact_match")
    key = f"task.reward={shown(reference)}"
    if reference.startswith("__main__:"):
        raise UserError(f"{key}: the worker process cannot import the script that runs; put the function into a file beside it")
    if not callable(function):
        raise UserError(f"{key}: is a {type(function).__name__}, not a function (problem, response) -> float")
    try:
        inspect.signature(function).bind(Problem("", ""), "")
    except (TypeError, ValueError) as error:
        raise UserError(f"{key}: must take (problem, response): {error}") from error
    accepted: RewardFunction = function
    return accepted


def reward_worker(reference: str, timeout: float) -> Grader:
    """A worker process that calls the function; ``timeout`` in seconds for one call."""
    start = partial(import_reward, reference)  # ahead of the first call, so that no call's time pays for it
    return Grader(partial(_call, reference), start, timeout)


def _call(reference: str, problem: Problem, response: str) -> float:
    return import_reward(reference)(problem, response)
