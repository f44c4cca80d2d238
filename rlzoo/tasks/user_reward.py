"""A reward function of the user's own, found by its ``module:function`` name and called in a worker process."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial

from rlzoo.errors import UserError, shown
from rlzoo.tasks.grading import Grader
from rlzoo.tasks.user_code import import_named
from rlzoo.types import Problem

RewardFunction = Callable[[Problem, str], float]


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
    return Grader(partial(_call, reference), partial(_start, reference), timeout)


_imported = cache(import_reward)


def _start(reference: str) -> None:
    _imported(reference)  # ahead of the first call, so that no call's time pays for it


def _call(reference: str, problem: Problem, response: str) -> float:
    return _imported(reference)(problem, response)
