"""Draws the spread of S in the texts of `length_law_texts.py`.

    python -m examples.lab.length_law_picture FOLDER length-law-texts.svg

FOLDER contains ``length-law-texts.csv`` and ``length-law-texts-fit.csv``. Each panel shows, for one kind of step, the standard
deviation of S divided by the square root of the length, with 95% intervals, and the predictions of both models.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from scipy.stats import chi2

from examples.lab.length_law_fit import read

LOOKS = {"tokens": ("-", "token variances by position"), "a L + b L^2": (":", "$a L + b L^2$")}


def draw(folder: Path, target: Path) -> None:
    """Draw one panel for each kind of step."""
    mpl.rcParams["svg.hashsalt"] = "rlzoo"  # the same numbers give the same file
    with (folder / "length-law-texts-fit.csv").open(newline="") as file:
        fits = list(csv.DictReader(file))
    texts = read(folder / "length-law-texts.csv")
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, (kind, windows) in zip(figure.subplots(1, len(texts), sharey=True, squeeze=False)[0], texts.items(), strict=True):
        lengths, deviations = windows.lengths, np.sqrt(windows.variances())
        degrees = np.array([(windows.length == length).sum() - 1 for length in lengths])
        # the interval of a normal sample's standard deviation
        low, high = (deviations * np.sqrt(degrees / chi2.ppf(level, degrees)) for level in (0.975, 0.025))
        rows = {row["model"]: row for row in fits if row["step"] == kind}
        left_out = np.isin(lengths, [float(length) for length in rows["tokens"]["tested"].split()])
        for chosen, style, label in ((~left_out, "o", "fitted"), (left_out, "s", "left out")):
            root = np.sqrt(lengths[chosen])
            errors = np.array([deviations[chosen] - low[chosen], high[chosen] - deviations[chosen]]) / root
            fill = {"markerfacecolor": "white"} if style == "s" else {}
            axes.errorbar(
                lengths[chosen], deviations[chosen] / root, yerr=errors, fmt=style, color="tab:blue", markersize=4.5,
                linewidth=1, label=label, **fill,
            )  # fmt: skip
        for model, (line, label) in LOOKS.items():
            predicted = np.sqrt([float(value) for value in rows[model]["predicted variance"].split()])
            axes.plot(lengths, predicted / np.sqrt(lengths), line, color="0.3", linewidth=1.4, label=label)
        axes.set_title(f"{kind} step", fontsize=10, loc="left")
        axes.set_xscale("log", base=2)
        axes.set_xlabel("length in tokens")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylim(bottom=0)  # shared by all panels
    figure.axes[0].set_ylabel("deviation of S / sqrt(L)")
    figure.axes[1].legend(frameon=False, fontsize=8)
    figure.savefig(target, metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
