"""Writes the benchmark results page, with one section per CPU: ``python -m examples.bench.page bench.json``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from examples.bench.cases import CASES

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "reference" / "performance.md"
DATA = PAGE.with_suffix(".json")


def table(head: list[str], rows: list[list[str]]) -> str:
    """Format a Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def comparison(report: dict[str, Any]) -> str:
    """Format a table with one row per case, showing TRL's time as a multiple of rlzoo's."""
    rows = []
    for name in dict.fromkeys(row["case"] for row in report["rows"]):
        phases = {row["phase"]: row for row in report["rows"] if row["case"] == name}
        step = phases["step"]
        memory = step["rlzoo_learner_peak_bytes"] / step["trl_learner_peak_bytes"]
        ratios = [f"{phases[phase]['ratio_median']:.2f}" for phase in ("rollout", "learner")]
        spread = f"**{step['ratio_median']:.2f}** ({min(step['ratios']):.2f} to {max(step['ratios']):.2f})"
        seconds = f"{step['rlzoo_seconds']:.2f} / {step['trl_seconds']:.2f}"
        about = f"{CASES[name].about}; {CASES[name].updates} update{'s' if CASES[name].updates > 1 else ''}"
        peaks = f"{step['rlzoo_learner_peak_bytes'] / 1e9:.2f} / {step['trl_learner_peak_bytes'] / 1e9:.2f}"
        rows.append([name, about, *ratios, spread, str(step["pairs"]), seconds, f"{peaks} ({memory:.2f})"])
    head = ["case", "a step", "sampling", "learning", "whole step", "pairs", "seconds", "learner's peak, GB"]
    return table(head, rows)


def roofline(report: dict[str, Any]) -> str:
    """Format a table with the bound from the matrix product rate and each library's share of it, by case and phase."""
    machine = report["machine"]
    gain = machine["onednn_float32"] / machine["matmul_float32"]
    rows = [
        [
            row["case"] + ("" if "matmul_rates" in row else "*"),
            row["phase"],
            f"{row['bound_seconds']:.3f}",
            f"{row['rlzoo_seconds'] / row['bound_seconds']:.1f}",
            "" if CASES[row["case"]].autocast == "bfloat16" else f"{row['rlzoo_seconds'] / row['bound_seconds'] * gain:.1f}",
            f"{row['rlzoo_share_of_bound']:.0%}",
            f"{row['trl_share_of_bound']:.0%}",
        ]
        for row in report["rows"]
    ]
    takes = ["rlzoo's time / bound", "rlzoo's time / bound at oneDNN's rate"]
    return table(["case", "phase", "bound, seconds", *takes, "rlzoo's share of the rate", "TRL's share"], rows)


def growth(report: dict[str, Any]) -> str:
    """Format a table with one row per size."""
    rows = [
        [
            str(row["completions"]),
            str(row["length"]),
            *(f"{row['microseconds_per_token'][phase]:.1f}" for phase in ("rollout", "learner", "step")),
            f"{row['peak'] / 1e9:.2f}",
        ]
        for row in report["growth"]
    ]
    return table(["completions", "tokens each", "sampling, µs per token", "learning", "whole step", "peak, GB"], rows)


def beside(report: dict[str, Any]) -> str:
    """Format a table with one row per run."""
    parts = ("rule", "metrics", "journal", "mlflow", "sum")
    rows = [[name, *(f"{shares[part]:.1%}" for part in parts)] for name, shares in report["beside"].items()]
    return table(["share of a step in", "rule", "metrics", "journal", "MLflow", "total"], rows)


def machine_part(report: dict[str, Any]) -> str:
    """Format one machine's results."""
    machine, packages = report["machine"], report["packages"]
    values = {
        "processor": report["processor"],
        "date": report["date"],
        "comparison": comparison(report),
        "roofline": roofline(report),
        "growth": growth(report),
        "packages": ", ".join(f"{name} {number}" for name, number in packages.items()),
        "float32": f"{machine['matmul_float32'] / 1e9:.0f}",
        "onednn": f"{machine['onednn_float32'] / 1e9:.0f}",
        "bfloat16": f"{machine['matmul_bfloat16'] / 1e9:.0f}",
        "memory": f"{machine['memory'] / 1e9:.0f}",
        "threads": f"{machine['threads']:.0f}",
        "start": ", ".join(f"{seconds:.1f}" for seconds in report["start_seconds"]),
        "beside": beside(report),
    }
    text = (HERE / "machine.md").read_text(encoding="utf-8")
    for name, value in values.items():
        text = text.replace(f"<<{name}>>", value)
    return text


def page(reports: list[dict[str, Any]]) -> str:
    """Format the whole page."""
    parts = "\n".join(map(machine_part, reports))
    return (HERE / "page.md").read_text(encoding="utf-8").replace("<<machines>>\n", parts)


if __name__ == "__main__":
    new = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    known = json.loads(DATA.read_text(encoding="utf-8"))
    data = [report for report in known if report["processor"] != new["processor"]] + [new]
    DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(data), encoding="utf-8")
