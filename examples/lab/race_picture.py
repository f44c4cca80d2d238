"""Does evenness over lengths pay, or the direction of the gradient? A picture from the numbers of a race.

``python examples/lab/race_picture.py race.csv picture.svg``: every rule's accuracy against its ``lre_max`` and against its
cosine to the unclipped gradient, means over seeds with their standard errors, and Spearman's rank correlation of each; only
rules that can be scaled to the matched clip fraction. ``race.csv`` is what `race_numbers.py` printed.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from scipy.stats import sem, spearmanr

FRACTION = 0.1
LABELS = {"lre_max": "lre_max at a clip fraction of 10 %", "cosine": "cosine to the unclipped gradient at 10 %"}


def main() -> None:
    """Read, correlate, draw."""
    source, target = sys.argv[1:]
    runs = defaultdict(list)
    for row in csv.DictReader(Path(source).read_text(encoding="utf-8").splitlines()):
        runs[row["rule"]].append(row)
    values = {
        rule: {name: np.array([float(row[name]) for row in rows]) for name in ("accuracy", "matched_clip_fraction", *LABELS)}
        for rule, rows in runs.items()
    }
    matched = {rule: of for rule, of in values.items() if abs(of["matched_clip_fraction"].mean() - FRACTION) < 0.005}
    mpl.rcParams["svg.hashsalt"] = "rlzoo"  # the same numbers give the same file
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    for axes, (name, label) in zip(figure.subplots(1, 2, sharey=True), LABELS.items(), strict=True):
        x = [of[name].mean() for of in matched.values()]
        y = [of["accuracy"].mean() for of in matched.values()]
        rank = spearmanr(x, y)
        axes.errorbar(x, y, [sem(of["accuracy"]) for of in matched.values()], fmt="o", ms=5, lw=1, color="#0072b2")
        for rule, at in zip(matched, zip(x, y, strict=True), strict=True):
            axes.annotate(rule, at, xytext=(5, 4), textcoords="offset points", fontsize=8)
        axes.set_xlabel(label)
        axes.set_title(f"rank correlation {rank.statistic:.2f} (p = {rank.pvalue:.2g}, {len(matched)} rules)", fontsize=10)
        print(f"{name:8} rank correlation {rank.statistic:.3f}, p = {rank.pvalue:.2g}, over {len(matched)} rules")
    figure.axes[0].set_ylabel("held-out accuracy after 40 steps")
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main()
