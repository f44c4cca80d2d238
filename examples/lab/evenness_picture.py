"""Draws the length error of every rule on rollouts from five rules, in total and conditional on the sign of the advantage.

``python -m examples.lab.evenness_picture evenness.csv evenness.svg`` draws a group of bars for each training rule. Bars are
means over the rule's runs, and dots are individual runs. The dashed line is the mean noise floor, which is the error to expect
if all lengths were clipped equally.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from statistics import fmean

import matplotlib as mpl
from matplotlib.figure import Figure

from rlzoo.measure.colours import rule_colour

RULES = ("fspo", "gspo", "rloo", "fspo-adaptive")
PANELS = (
    ("overall", "total", "10 % clipped, all responses pooled"),
    ("overall", "conditional", "the same, given the sign of the advantage"),
    ("by sign", "conditional", "10 % clipped of either sign"),
)


def main() -> None:
    """Draw the picture."""
    source, target = map(Path, sys.argv[1:])
    with source.open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["seed"] != "all" and row["part"] == "all"]
    made = list(dict.fromkeys(row["rollouts_of"] for row in rows))
    mpl.rcParams["svg.hashsalt"] = "rlzoo"  # a fixed salt makes the file reproducible
    figure = Figure(figsize=(10.5, 3.4), layout="constrained")
    for axes, (matched, part, title) in zip(figure.subplots(1, len(PANELS), sharey=True), PANELS, strict=True):
        for place, rule in enumerate(RULES):
            color = rule_colour(rule)
            for group, rollouts in enumerate(made):
                cell = (rule, rollouts, matched)
                found = [float(row[part]) for row in rows if (row["rule"], row["rollouts_of"], row["matched"]) == cell]
                if not found:
                    continue
                x = group + (place - 1.5) * 0.2
                axes.bar(x, fmean(found), 0.18, color=color, alpha=0.45, label=rule if group == 0 else None)
                axes.plot([x] * len(found), found, ".", color=color, markersize=3)
        noise = fmean(float(row["noise"]) for row in rows if row["matched"] == matched)
        axes.axhline(noise, color="0.3", linestyle="--", linewidth=1)
        axes.set_title(title, fontsize=9, loc="left")
        axes.set_xticks(range(len(made)), [name.replace("fspo-adaptive", "adaptive") for name in made], fontsize=8)
        axes.set_xlabel("rollouts of", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("lre_max")
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(target, metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()
