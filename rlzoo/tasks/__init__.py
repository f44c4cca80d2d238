"""Tasks, which are prompts with verifiable rewards, and the function that builds a task from its settings."""

from __future__ import annotations

from rlzoo.core.hookspecs import hookimpl
from rlzoo.tasks.problem import Problem
from rlzoo.tasks.task import Task, build_task, is_held_out

__all__ = ["Problem", "Task", "build_task", "is_held_out"]


@hookimpl
def rlzoo_tasks() -> dict[str, str]:
    """Return the tasks that need no adapter for another library."""
    return {
        "arithmetic": "rlzoo.tasks.arithmetic:ArithmeticTask",
        "environment": "rlzoo.tasks.episodes:EnvironmentTask",
        "guess": "rlzoo.tasks.guess:GuessTask",
        "math_file": "rlzoo.tasks.math_file:MathFileTask",
        "tools": "rlzoo.tasks.tools:ToolTask",
    }
