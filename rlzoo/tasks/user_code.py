"""Imports the user's code by ``module:name``, including code in the current directory."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rlzoo.core.errors import UserError, did_you_mean, shown
from rlzoo.tasks.async_grading import AsyncGrader, is_coroutine_function
from rlzoo.tasks.grading import Grade, Grader
from rlzoo.tasks.problem import Problem

RewardFunction = Callable[[Problem, str], Any]
"""A function that returns a number or a mapping from names to numbers, or, with ``async def``, an awaitable of either."""


def import_named(setting: str, reference: str, form: str) -> Any:
    """Return the object to which ``module:name`` refers.

    Args:
        setting: the setting that holds the reference, for error messages.
        reference: ``module:name``, where the module name may contain dots.
        form: the expected form of the reference, with an example, for error messages.

    Raises:
        UserError: the reference has the wrong form, or the module or name is not found.
    """
    key = f"{setting}={shown(reference)}"
    module_name, _, name = reference.partition(":")
    if not all(word.isidentifier() for word in [*module_name.split("."), name]) or module_name.endswith(".py"):
        raise UserError(f"{key}: expected {form}{_module_of(module_name, name)}")
    here = str(Path.cwd())
    if here not in sys.path:  # unlike python -m, an installed command does not import from the current directory
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # importing the user's module may raise any exception
        reason = f"it exits when it is imported ({error!r})" if isinstance(error, SystemExit) else error
        raise UserError(f"{key}: cannot import {module_name!r} from {here} or the installed packages: {reason}") from error
    value = getattr(module, name, None)
    if value is None:
        names = [name for name, known in vars(module).items() if callable(known) and not name.startswith("_")]
        raise UserError(f"{key}: {module_name} has no {name!r}{did_you_mean(name, names)}")
    return value


def _module_of(path: str, name: str) -> str:
    """Return a hint for the error message if the user gave the path of a Python file, else an empty string."""
    if not path.endswith(".py"):
        return ""
    module = path.removesuffix(".py").removeprefix("./").replace("/", ".")
    if all(word.isidentifier() for word in module.split(".")):
        return f"; write {module}:{name or 'NAME'}"
    return f"; run rlzoo in the folder of the file, and write {Path(path).stem}:{name or 'NAME'}"


def import_reward(reference: str) -> RewardFunction:
    """Return the function named by ``module:function``. The module may be in the current directory.

    Raises:
        UserError: the module or function is not found, or the function cannot be called with (problem, response).
    """
    function = import_named("task.reward", reference, "module:function, for example my_rewards:exact_match")
    key = f"task.reward={shown(reference)}"
    if reference.startswith("__main__:"):
        raise UserError(
            f"{key}: the worker process cannot import the main script; move the function to another file in the same folder"
        )
    if not callable(function):
        kind = type(function).__name__
        raise UserError(f"{key}: expected a function (problem, response) -> float, got an object of type {kind}")
    try:
        inspect.signature(function).bind(Problem("", ""), "")
    except (TypeError, ValueError) as error:
        raise UserError(f"{key}: must accept the arguments (problem, response): {error}") from error
    accepted: RewardFunction = function
    return accepted


def reward_worker(reference: str, timeout: float, concurrency: int = 1) -> Grader | AsyncGrader:
    """Return a worker process that calls the user's reward function with a time limit of ``timeout`` seconds per call.

    Up to ``concurrency`` calls of an ``async def`` function run at once.
    """
    # import before the first call, so that the import does not count against the time limit
    start = partial(import_reward, reference)
    if is_coroutine_function(start()):
        return AsyncGrader(start, timeout, concurrency)
    return Grader(partial(_call, reference), start, timeout)


def _call(reference: str, problem: Problem, response: str) -> Grade:
    reward: Grade = import_reward(reference)(problem, response)
    return reward
