"""Prints, for each run directory, the held-out accuracy before and after training and the clip fraction, overall and by length.

python examples/lab/summarise_runs.py runs/*
"""

import json
import sys
from pathlib import Path

BINS = range(6)

print("| run | accuracy before | after | clip fraction | low / high / ceiling | by length bin, short to long | lre_max |")
print("|---|---|---|---|---|---|---|")
for folder in map(Path, sys.argv[1:]):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    accuracy = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    updated = [row for row in rows if "clip/fraction" in row]

    def mean(key: str, rows: list[dict[str, float]] = updated) -> float:
        """Return the metric's mean over the steps that report it, or 0 if no step does."""
        values = [row[key] for row in rows if key in row]
        return sum(values) / len(values) if values else 0.0

    sides = " / ".join(f"{mean(f'clip/fraction_{side}'):.3f}" for side in ("low", "high", "dual"))
    profile = " ".join(f"{mean(f'clip/fraction_length_bin_{k}'):.2f}" for k in BINS)
    print(
        f"| {folder.name} | {accuracy[0]:.3f} | {accuracy[-1]:.3f} | {mean('clip/fraction'):.3f} | {sides} | {profile} "
        f"| {mean('fairness/lre_max'):.3f} |"
    )
