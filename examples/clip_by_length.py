"""Shows what several rules would have clipped in one run, by length, at the same overall clip fraction.

    rlzoo train --clip gspo --output runs/gspo
    python examples/clip_by_length.py runs/gspo clip-by-length.svg

Instead of a run directory, you can pass a folder with rollout files from another trainer. A third argument, a comma-separated
list, selects other rules.

Every rule is applied to the same recorded log-probs, as in `rlzoo replay`. A rule's widths are scaled until it clips a tenth of
all responses with a non-zero advantage (for grpo, a tenth of their tokens). Bars show 95% intervals over prompts. ``lre_max``
is printed with its noise, which is the value to expect from this many prompts if all lengths were clipped equally.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from rlzoo import load_zoo
from rlzoo.lab.recorded import RecordedRun
from rlzoo.lab.study import replay
from rlzoo.measure.figures import Series, plot_by_length

RULES = ("fspo", "gspo", "grpo", "rloo")
FRACTION = 0.1
FEW = 5  # maximum number of rules in one panel


def main() -> None:
    """Replay the rules, print a table and draw the figure."""
    path, target, *names = sys.argv[1:]
    rules = names[0].split(",") if names else RULES
    run = RecordedRun.read(Path(path))
    zoo = load_zoo()
    replayed = replay(run, [zoo[name]() for name in rules], match=FRACTION)
    series, width = {}, max(map(len, rules))
    print(f"{'rule':{width}} {'clipped':>8} {'lre_max':>8} {'low':>6} {'high':>6} {'noise':>6}  by length, short to long")
    for rule in replayed.rules:
        found = rule.profile
        if rule.note or found.lre_max_interval is None:
            print(f"{rule.label:{width}} skipped: {rule.note or 'it clips nothing here'}")
            continue
        both, (low, high) = found.both, found.lre_max_interval
        series[rule.label] = Series(x=found.median_length, y=both.fraction, low=both.low, high=both.high)
        numbers = f"{found.clip_fraction:8.3f} {found.lre_max:8.3f} {low:6.3f} {high:6.3f} {found.lre_noise:6.3f}"
        print(f"{rule.label:{width}} {numbers}  {' '.join(f'{share:.3f}' for share in both.fraction)}")
    print(f"{sum(both.count):,} responses with a nonzero advantage, median lengths {found.median_length}")
    title = f"responses of a run with {run.trained_with}, every rule clipping {FRACTION:.0%}"
    figure = plot_by_length(series, title=title) if len(series) <= FEW else panels(series, title)
    for axes in figure.axes:
        axes.axhline(FRACTION, color="0.4", linestyle=":", linewidth=1)  # where a rule that clips all lengths equally would lie
    mpl.rcParams["svg.hashsalt"] = "rlzoo"  # a fixed salt makes the file reproducible
    figure.savefig(target, metadata={"Date": None}, facecolor="white")


def panels(series: dict[str, Series], title: str) -> Figure:
    """Draw a panel for each rule, with common axes."""
    figure = Figure(figsize=(9.6, 1.9 * math.ceil(len(series) / 5) + 0.5), layout="constrained")
    grid = figure.subplots(math.ceil(len(series) / 5), 5, sharex=True, sharey=True).flat
    for axes in list(grid)[len(series) :]:
        axes.remove()
    for axes, (label, points) in zip(figure.axes, series.items(), strict=True):
        x, y, low, high = (np.array(values, dtype=float) for values in (points.x, points.y, points.low, points.high))
        axes.errorbar(x, y, yerr=np.maximum(0.0, [y - low, high - y]), fmt="o-", markersize=3.5, linewidth=1.3, elinewidth=0.9)
        axes.set_title(label, fontsize=9, loc="left")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    figure.supxlabel("response length in tokens", fontsize=9)
    figure.supylabel("clip fraction", fontsize=9)
    return figure


if __name__ == "__main__":
    main()
