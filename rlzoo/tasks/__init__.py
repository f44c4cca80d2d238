"""Tasks (prompts with verifiable rewards), and the function that builds a task from its settings."""

from __future__ import annotations

from rlzoo.tasks.task import Task, build_task, is_held_out, task_names

__all__ = ["Task", "build_task", "is_held_out", "task_names"]
