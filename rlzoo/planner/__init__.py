"""What a run will take, computed from its configuration and its model's shape alone: memory, work, time, disk."""

from __future__ import annotations

from rlzoo.planner.architecture import Architecture, find_architecture
from rlzoo.planner.devices import Devices, parse_devices, this_machine
from rlzoo.planner.plan import Plan, make_plan
from rlzoo.planner.prompts import Prompts, longest_prompt

__all__ = [
    "Architecture",
    "Devices",
    "Plan",
    "Prompts",
    "find_architecture",
    "longest_prompt",
    "make_plan",
    "parse_devices",
    "this_machine",
]
