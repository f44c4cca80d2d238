"""Shows the plan of a run for `rlzoo train --dry-run`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.table import Table

from rlzoo.cli.console import Plain
from rlzoo.cli.tables import table
from rlzoo.config.redaction import redact_settings
from rlzoo.config.run_config import RunConfig
from rlzoo.core.errors import UserError
from rlzoo.gate.devices import parse_devices
from rlzoo.gate.enter import forecast, rehearse
from rlzoo.gate.memory import Memory
from rlzoo.gate.plan import Plan
from rlzoo.gate.settings import missing_libraries, remarks, shortages, shown
from rlzoo.gate.tokens import question_counts


def dry_run(
    config: RunConfig, devices: str | None, as_json: bool, *, resume: bool = False, allow_changed: bool = False
) -> None:
    """Check a run and print its configuration to stdout and its plan to stderr, or both as JSON to stdout."""
    named = parse_devices(devices) if devices else None
    plan = forecast(config, named, resume=resume)
    counts = [line for _, line in question_counts(config.task, config.eval.num_problems)]
    notes = [*counts, *missing_libraries(config), *_notes(plan), *(line for _, line in remarks(config))]
    lines = [("note", note) for note in notes]
    try:
        for shortage in shortages(plan):
            raise UserError(shortage)
        gate = rehearse(plan, resume=resume, allow_changed=allow_changed)
        lines.append(("gate", gate))
        if as_json:
            shown_plan = {**plan.as_dict(), "gate": gate, "notes": notes}
            print(json.dumps({"config": redact_settings(config.model_dump(mode="json")), "plan": shown_plan}, indent=2))
        else:
            print(config.to_yaml(), end="", flush=True)
    finally:  # printed below the configuration, or above the error message
        if not as_json:
            _print(plan, lines)


def _notes(plan: Plan) -> list[str]:
    config, notes = plan.config, []
    if plan.memory is None:
        notes.append(
            f"the shape of model {config.model.path!r} is not known on this machine: memory and disk are not "
            "estimated; set model.path to a folder that contains the model's config.json"
        )
    if not plan.prompts.counted:
        notes.append("the tokenizer is not on this machine: prompt lengths are estimated from the text")
    if plan.memory is not None and 0.9 * plan.device_memory < plan.memory.peak <= plan.device_memory:
        notes.append("the peak is within 10% of the device's memory: fragmentation and the driver may use up the rest")
    return notes


def _print(plan: Plan, lines: Sequence[tuple[str, str]]) -> None:
    console = Plain(stderr=True)
    for name, text in (*lines, *_facts(plan)):
        console.print(f"{name:<12} {text}")
    if plan.memory is not None:
        console.print(_memory_table(plan.memory))


def _facts(plan: Plan) -> list[tuple[str, str]]:
    config, sharding, batch = plan.config, plan.sharding, plan.batch
    size = f", {plan.architecture.num_parameters / 1e6:,.1f} M parameters" if plan.architecture else ""
    about = "" if plan.prompts.counted else "about "
    zero = f", ZeRO-{sharding.stage}" if sharding.stage else ", FSDP2" if sharding.is_fsdp else ""
    rows = f"{batch.rows} row{'s' if batch.rows > 1 else ''} of up to {batch.length:,} tokens"
    tokens, several = config.steps * plan.responses * batch.response, sharding.processes > 1
    facts = [
        ("run", f"{config.clip.name} on {config.task.name}, model {config.model.path}{size}"),
        ("steps", f"{config.steps:,} of {plan.responses:,} responses; {config.steps * plan.updates:,} optimizer steps in all"),
        ("tokens", f"at most {tokens:,} sampled; prompts of up to {about}{plan.prompts.longest:,} tokens"),
        ("devices", f"{_devices(plan)}{zero}"),
        ("micro-batch", f"{rows}, {plan.passes} per optimizer step"),
    ]
    if plan.memory is not None and plan.disk is not None:
        disk = {name: shown(size) for name, size in plan.disk.items()}
        facts += [("network", f"each process sends {shown(sent)} per step, estimated")] if (sent := plan.traffic) else []
        facts += [
            ("disk", f"checkpoints {disk['checkpoints']}, rollouts at most {disk['rollouts']}"),
            (
                "memory",
                f"{shown(plan.memory.peak)} of {shown(plan.device_memory)}{' on each device' if several else ''}, estimated:",
            ),
        ]
    return facts


def _devices(plan: Plan) -> str:
    """Describe the devices, as in ``8 x H100, 80.0 GB each``."""
    number, memory = plan.sharding.processes, shown(plan.device_memory)
    if plan.devices.is_cpu and number == 1:
        return f"{plan.devices.name}, {memory} of memory, one process"
    if plan.devices.is_cpu:
        return f"{plan.devices.name}, shared by {number} processes, {memory} each"
    return f"{number} x {plan.devices.name}, {memory} each" if number > 1 else f"{plan.devices.name}, {memory}"


def _memory_table(memory: Memory) -> Table:
    rows = table("<", ">learning", ">sampling")
    learning, sampling = memory.learning, memory.sampling
    for name in dict.fromkeys((*learning, *sampling)):
        sizes = [parts.get(name, 0) for parts in (learning, sampling)]
        if any(sizes):
            rows.add_row(f"  {name}", *(shown(size) if size else "-" for size in sizes))
    rows.add_row("  total", shown(sum(learning.values())), shown(sum(sampling.values())))
    return rows
