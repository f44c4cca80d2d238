"""Fits the variance law of the summed log-ratio to the windows from `length_law.py` and tests it on held-out lengths.

    python -m examples.lab.length_law_fit length-law.csv --results FOLDER [--figure length-law.svg]

The script writes ``length-law-fit.csv`` with a row for each kind of step and each split of the lengths. A row contains the
coefficients with 95% intervals, and the errors of the predicted variance at the held-out lengths for the law, for each of its
two terms alone, and for a free power. For three bands, a row also contains the number of held-out lengths at which the
predicted clip fraction lies in the 95% interval of the measured clip fraction. ``between`` holds out every other length, and
``beyond`` holds out the longer half. Intervals are computed by resampling whole documents.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

Array = NDArray[Any]
FRACTION = 0.1
NUM_RESAMPLES = 500
BANDS: dict[str, float] = {
    "constant": 0.0,
    "sqrt(L)": 0.5,
    "L": 1.0,
}  # each band grows with this power of the length
MODELS = ("a L + b L^2", "a L", "b L^2", "c L^p")
SPLITS: dict[str, Callable[[Array], Array]] = {
    "between": lambda lengths: np.arange(len(lengths)) % 2 == 0,
    "beyond": lambda lengths: np.arange(len(lengths)) < len(lengths) / 2,
}


@dataclass(frozen=True, slots=True)
class Windows:
    """The summed log-ratios of windows for one kind of step."""

    document: Array  # (n,)
    length: Array  # (n,) tokens
    total: Array  # (n,) S

    @property
    def lengths(self) -> Array:
        """The distinct lengths, ascending."""
        return np.unique(self.length)

    def resampled(self, rng: np.random.Generator) -> Windows:
        """Return a bootstrap resample: the windows of the same number of documents, drawn with replacement."""
        names = np.unique(self.document)
        drawn = rng.choice(names, len(names))
        index = np.concatenate([np.flatnonzero(self.document == name) for name in drawn])
        new = np.repeat(np.arange(len(drawn)), [int((self.document == name).sum()) for name in drawn])
        return Windows(new.astype(float), self.length[index], self.total[index])

    def variances(self) -> Array:
        """Return the variance of S at each length."""
        return np.array([self.total[self.length == length].var(ddof=1) for length in self.lengths])


@dataclass(frozen=True, slots=True)
class Fit:
    """All models of the variance, fitted to some of the lengths."""

    a: float
    b: float
    root: float  # coefficient of the model a L
    line: float  # coefficient of the model b L^2
    power: tuple[float, float]  # c and p of the model c L^p

    @classmethod
    def of(cls, lengths: Array, variances: Array) -> Fit:
        """Fit the models by minimising the relative error of the variance over all lengths."""
        columns = np.stack([lengths, lengths**2], 1) / variances[:, None]
        a, b = nnls(columns, np.ones(len(lengths)))[0]
        root, line = (float(column.sum() / np.square(column).sum()) for column in columns.T)
        exponent, logarithm = np.polyfit(np.log(lengths), np.log(variances), 1)
        return cls(float(a), float(b), root, line, (float(np.exp(logarithm)), float(exponent)))

    def variance(self, model: str, lengths: Array) -> Array:
        """Return the variance that a model in `MODELS` predicts."""
        c, p = self.power
        curves = (self.a * lengths + self.b * lengths**2, self.root * lengths, self.line * lengths**2, c * lengths**p)
        return dict(zip(MODELS, curves, strict=True))[model]

    @property
    def crossover(self) -> float:
        """The length in tokens at which the two parts of the variance are equal."""
        return self.a / self.b if self.b > 0 else np.inf


def width(windows: Windows, power: float) -> float:
    """Return the width c of a band ``+- c L^power`` that excludes a tenth of the windows, with equal weight for all lengths."""
    scaled = np.abs(windows.total) / windows.length**power
    number = np.array([(windows.length == length).sum() for length in windows.length])
    order = np.argsort(-scaled)
    weight = np.cumsum(1 / number[order]) / len(windows.lengths)
    return float(scaled[order[np.searchsorted(weight, FRACTION)]])


def clipped(windows: Windows, edge: float, power: float) -> Array:
    """Return the share of windows outside a band at each length."""
    outside = np.abs(windows.total) > edge * windows.length**power
    return np.array([outside[windows.length == length].mean() for length in windows.lengths])


def predicted_clip(windows: Windows, fit: Fit, fitted: Array, edge: float, power: float) -> Array:
    """Predict the share outside a band at each length from the fitted variance and the distribution at the fitted lengths."""
    lengths, inside = windows.lengths, np.isin(windows.length, windows.lengths[fitted])
    shape = np.abs(windows.total[inside]) / np.sqrt(fit.variance(MODELS[0], windows.length[inside]))
    spread = np.sqrt(fit.variance(MODELS[0], lengths))
    return np.array([(shape * each > edge * length**power).mean() for each, length in zip(spread, lengths, strict=True)])


def error(predicted: Array, measured: Array) -> float:
    """Return the RMS log-ratio of the variances as a relative error, so 0.1 means about 10% too high or too low."""
    return float(np.expm1(np.sqrt(np.square(np.log(predicted / measured)).mean())))


def analysed(kind: str, windows: Windows) -> list[dict[str, Any]]:
    """Return a row for each split of the lengths."""
    rng = np.random.default_rng(0)
    resamples = [windows.resampled(rng) for _ in range(NUM_RESAMPLES)]
    lengths, variances = windows.lengths, windows.variances()
    rows = []
    for split, choose in SPLITS.items():
        fitted = choose(lengths)
        fit = Fit.of(lengths[fitted], variances[fitted])
        fits = [Fit.of(lengths[fitted], one.variances()[fitted]) for one in resamples]
        row: dict[str, Any] = {
            "step": kind,
            "left_out": split,
            "fitted": words(lengths[fitted]),
            "tested": words(lengths[~fitted]),
        }
        for name, value, drawn in (
            ("sigma", fit.a**0.5, [one.a**0.5 for one in fits]),
            ("tau", fit.b**0.5, [one.b**0.5 for one in fits]),
            ("crossover", fit.crossover, [one.crossover for one in fits]),
            ("power", fit.power[1] / 2, [one.power[1] / 2 for one in fits]),
        ):
            low, high = np.quantile(drawn, [0.025, 0.975], method="inverted_cdf")
            row |= {name: value, f"{name}_low": float(low), f"{name}_high": float(high)}
        errors = np.array([error(windows_variances[~fitted], variances[~fitted])
                           for windows_variances in (one.variances() for one in resamples)])  # fmt: skip
        row["sampling_error"] = float(
            np.median(errors)
        )  # the error that a perfect prediction would have because of the choice of documents
        for model in MODELS:
            row[f"error of {model}"] = error(fit.variance(model, lengths[~fitted]), variances[~fitted])
        for band, power in BANDS.items():
            edge = width(Windows(*(column[np.isin(windows.length, lengths[fitted])] for column in columns(windows))), power)
            expected = predicted_clip(windows, fit, fitted, edge, power)
            low, high = np.quantile([clipped(one, edge, power) for one in resamples], [0.025, 0.975], axis=0)
            held = (low <= expected) & (expected <= high)
            row[f"clip by {band}"] = words(clipped(windows, edge, power))
            row[f"predicted clip by {band}"] = words(expected)
            row[f"held by {band}"] = f"{int(held[~fitted].sum())} of {int((~fitted).sum())}"
        rows.append(row)
    return rows


def columns(windows: Windows) -> tuple[Array, Array, Array]:
    return windows.document, windows.length, windows.total


def words(values: Sequence[float] | Array) -> str:
    """Format numbers, separated by spaces."""
    return " ".join(f"{value:.3g}" if value < 1 else f"{value:g}" for value in np.asarray(values).tolist())


def read(file: Path) -> dict[str, Windows]:
    """Return the windows for each kind of step."""
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    kinds = [name for name in rows[0] if name not in ("document", "start", "length")]
    document, length = (np.array([float(row[name]) for row in rows]) for name in ("document", "length"))
    return {kind: Windows(document, length, np.array([float(row[kind]) for row in rows])) for kind in kinds}


def draw(found: dict[str, Windows], target: Path) -> None:
    """Draw the standard deviation of S divided by sqrt(L), measured and fitted, for every kind of step."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "rlzoo"  # a fixed salt makes the file reproducible
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, (kind, windows) in zip(figure.subplots(1, len(found), sharey=True, squeeze=False)[0], found.items(), strict=True):
        lengths, variances = windows.lengths, windows.variances()
        rng = np.random.default_rng(0)
        low, high = np.quantile([windows.resampled(rng).variances() for _ in range(NUM_RESAMPLES)], [0.025, 0.975], axis=0)
        fitted = SPLITS["between"](lengths)
        fit = Fit.of(lengths[fitted], variances[fitted])
        for chosen, style, label in ((fitted, "o", "fitted"), (~fitted, "s", "left out")):
            x, root = lengths[chosen], np.sqrt(lengths[chosen])
            y, ends = np.sqrt(variances[chosen]) / root, (np.sqrt(low[chosen]) / root, np.sqrt(high[chosen]) / root)
            errors = np.maximum(0, [y - ends[0], ends[1] - y])
            fill = {"markerfacecolor": "white"} if style == "s" else {}
            axes.errorbar(x, y, yerr=errors, fmt=style, color="tab:blue", markersize=4.5, linewidth=1, label=label, **fill)
        smooth = np.geomspace(lengths[0], lengths[-1], 100)
        for model, line in zip(MODELS[:2], ("-", ":"), strict=True):
            curve = np.sqrt(fit.variance(model, smooth) / smooth)
            axes.plot(smooth, curve, line, color="0.3", linewidth=1.2, label="sigma, tau" if line == "-" else "square root")
        axes.set_title(f"{kind} step", fontsize=10, loc="left")
        axes.set_xscale("log", base=2)
        axes.set_xlabel("length in tokens")
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("deviation of S / sqrt(L)")
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(target, metadata={"Date": None}, facecolor="white")


def main() -> None:
    """Fit and test the law, and write the results."""
    parser = argparse.ArgumentParser(description="Fit the law of the summed log-ratio, and test it on other lengths.")
    parser.add_argument("windows", type=Path)
    parser.add_argument("--results", type=Path, default=Path())
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    found = read(options.windows)
    rows = [row for kind, windows in found.items() for row in analysed(kind, windows)]
    with (options.results / "length-law-fit.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()} for row in rows
        )
    for row in rows:
        print(
            *(f"{key}: {value:.4g}" if isinstance(value, float) else f"{key}: {value}" for key, value in row.items()),
            sep="\n  ",
        )
    if options.figure:
        draw(found, options.figure)


if __name__ == "__main__":
    main()
