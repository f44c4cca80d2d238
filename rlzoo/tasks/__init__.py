"""Tasks, which are prompts with verifiable rewards, and how to build one from its settings."""

from __future__ import annotations

from rlzoo.tasks.task import Task, build_task, is_held_out, task_names

__all__ = ["Task", "build_task", "is_held_out", "task_names"]
