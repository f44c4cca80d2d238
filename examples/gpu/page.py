"""Writes docs/reference/gpu.md with a section for each device: ``python -m examples.gpu.page runs/gpu-cuda/gpu.json``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from examples.bench.page import table
from examples.gpu import rows as records
from examples.gpu.rows import Row

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "reference" / "gpu.md"
DATA = PAGE.with_suffix(".json")
NOT_YET = "**Not yet run on a GPU.** Every row below was measured on a CPU at a small scale. To measure on a GPU, run:"
RUN = "The following command produced the rows for GPUs below:"
TITLES = {
    "correctness": "Correctness",
    "speed": "Speed and memory",
    "trl": "Compared with TRL",
    "several": "Several processes",
}
WORDS = {"absent": "not available", "measured": ""}


def is_on_gpu(report: dict[str, Any]) -> bool:
    """Return whether the report is from a machine with a GPU."""
    return "gpus" in report["machine"]


def part_table(rows: Sequence[Row]) -> str:
    """Format a table with the rows of a part."""
    head = ["row", "what", "found", *(["allowed", ""] if any(row.allowed for row in rows) else [""])]
    lines = []
    for row in rows:
        found = " ".join(row.found.replace("|", "/").replace("<", "&lt;").split())
        verdict = WORDS.get(row.status, row.status)
        verdict = f"**{verdict}**" if row.status in ("failed", "stopped", "not run") else verdict
        lines.append([f"`{row.name}`", row.about, found, *([row.allowed] if len(head) == 5 else []), verdict])
    return table(head, lines)


def section(report: dict[str, Any]) -> str:
    """Format a section with the rows of one device."""
    machine = report["machine"]
    hardware = ", ".join(dict.fromkeys(machine.get("gpus", [machine["processor"]])))
    number = f"{len(machine['gpus'])} x " if "gpus" in machine else f"{machine['cores']} cores of "
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    lines = [f"## {report['mark']}", "", f"{number}{hardware}, {report['date']}; Python {machine['python']}, {versions}.", ""]
    for part, title in TITLES.items():
        own = [row for row in report["rows"] if row.part == part]
        if own:
            lines += [f"### {title}: {report['mark']}", "", part_table(own), ""]
    return "\n".join(lines)


def page(*reports: dict[str, Any]) -> str:
    """Format the whole page."""
    text = (HERE / "page.md").read_text(encoding="utf-8")
    text = text.replace("<<state>>", RUN if any(map(is_on_gpu, reports)) else NOT_YET)
    ordered = sorted(reports, key=lambda report: not is_on_gpu(report))
    return text.replace("<<devices>>", "\n".join(map(section, ordered)).rstrip())


def published() -> list[dict[str, Any]]:
    """Return the reports from which the documentation's page is written, one for each device and size."""
    known = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else []
    return [report | {"rows": [Row(**row) for row in report["rows"]]} for report in known]


def publish(file: Path) -> None:
    """Add a report to the documentation, replacing any earlier report with the same device and size."""
    new = records.read(file)
    reports = [report for report in published() if report["mark"] != new["mark"]] + [new]
    plain = [report | {"rows": [asdict(row) for row in report["rows"]]} for report in reports]
    DATA.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        publish(Path(name))
    PAGE.write_text(page(*published()), encoding="utf-8")
