"""Applies rules to the pooled rollouts of several short runs, with widths scaled to the same clip fraction on each run.

``python examples/lab/pooled_fairness.py FOLDER [FOLDER ...] --config smollm2-text --clip fspo,gspo,rloo,grpo`` prints the
length reweighting error of the pooled responses with its 95% interval over prompts. Each rule has a row for the runs of each
training rule and a row for all runs together. With ``--by turns``, episodes are binned by their number of turns instead of
their length.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rlzoo.config.run_config import RunConfig
from rlzoo.core.fairness import bin_edges, bin_index
from rlzoo.lab.recorded import RecordedRun
from rlzoo.lab.replay import match_clip_fraction, replay
from rlzoo.lab.runs import find_runs
from rlzoo.measure.profile import clusters
from rlzoo.measure.response_table import ResponseTable, pooled_runs


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--clip", required=True)
    parser.add_argument("--config", action="append", default=[])
    parser.add_argument("--fraction", type=float, default=0.1)
    parser.add_argument("--by", choices=("length", "turns"), default="length")
    options = parser.parse_args()
    records, _ = find_runs(options.folders)
    names = options.clip.split(",")
    tables: dict[tuple[str, str], dict[int, list[ResponseTable]]] = {}
    for record in records:
        run = RecordedRun.read(record.path)
        for name in names:
            policy = RunConfig.compose(options.config, clip=name).clip
            matched = match_clip_fraction(run, policy, options.fraction)
            table = replay(run, matched).table
            for kind in (record.policy, "all"):
                tables.setdefault((kind, name), {}).setdefault(record.seed, []).append(table)
    print(f"| rollouts of | rule | responses | clipped | lre_max | corrected | noise | clipped by {options.by}, few to many |")
    print("|---|---|---|---|---|---|---|---|")
    for (kind, name), found in sorted(tables.items()):
        rows = pooled_runs(map(ResponseTable.concat, found.values())).judged()
        size = getattr(rows, options.by)
        by_prompt = clusters(rows, bin_index(size, bin_edges(size)))
        parts = by_prompt.reweighting()
        worst = parts.conditional.max if parts else None
        if worst is None or worst.interval is None:
            continue
        sums = zip(by_prompt.clipped.sum((0, 2)), by_prompt.count.sum((0, 2)), strict=True)
        fractions = " ".join(f"{clipped / count:.2f}" for clipped, count in sums if count)  # equal sizes can leave bins empty
        error = f"{worst.value:.3f} [{worst.interval[0]:.3f}, {worst.interval[1]:.3f}]"
        print(f"| {kind} | {name} | {len(rows.length)} | {float(rows.clipped.mean()):.3f} | {error} | "
              f"{worst.corrected:.3f} | {worst.noise:.3f} | {fractions} |")  # fmt: skip


if __name__ == "__main__":
    main()
