"""Rules on the rollouts of several short runs together, each run's widths scaled to one clip fraction.

``python examples/lab/pooled_fairness.py FOLDER [FOLDER ...] --config smollm2-text --clip fspo,gspo,rloo,grpo``: a row for
each rule and kind of run, and for all runs, with the length reweighting error of the pooled responses and its 95 %
interval over prompts.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rlzoo.config.run_config import RunConfig
from rlzoo.lab.recorded import RecordedRun
from rlzoo.lab.replay import clip_fraction_of, match_clip_fraction, replay
from rlzoo.lab.run_records import find_runs
from rlzoo.measure.profile import LengthProfile
from rlzoo.measure.response_table import ResponseTable, pooled_runs


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--clip", required=True)
    parser.add_argument("--config", action="append", default=[])
    parser.add_argument("--fraction", type=float, default=0.1)
    options = parser.parse_args()
    records, _ = find_runs(options.folders)
    names = options.clip.split(",")
    tables: dict[tuple[str, str], dict[int, list[ResponseTable]]] = {}
    for record in records:
        run = RecordedRun.read(record.path)
        for name in names:
            policy = RunConfig.compose(options.config, clip=name).clip
            matched = match_clip_fraction(policy, options.fraction, clip_fraction_of(run))
            table = replay(run, matched).table
            for kind in (record.policy, "all"):
                tables.setdefault((kind, name), {}).setdefault(record.seed, []).append(table)
    print("| rollouts of | rule | responses | clipped | lre_max | noise | clipped by length, short to long |")
    print("|---|---|---|---|---|---|---|")
    for (kind, name), found in sorted(tables.items()):
        profile = LengthProfile.of(pooled_runs(map(ResponseTable.concat, found.values())))
        if profile is None or profile.lre_max is None or profile.lre_max_interval is None or profile.lre_noise is None:
            continue
        low, high = profile.lre_max_interval
        by_length = " ".join(f"{value:.2f}" for value in profile.both.fraction)
        error = f"{profile.lre_max:.3f} [{low:.3f}, {high:.3f}]"
        print(f"| {kind} | {name} | {sum(profile.both.count)} | {profile.clip_fraction:.3f} | {error} | "
              f"{profile.lre_noise:.3f} | {by_length} |")  # fmt: skip


if __name__ == "__main__":
    main()
