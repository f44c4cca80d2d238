"""Prompts with verifiable rewards: what a task is, and how one is built from its settings."""

from __future__ import annotations

from rlzoo.tasks.task import Task, build_task, is_held_out, task_names

__all__ = ["Task", "build_task", "is_held_out", "task_names"]
