"""Measures how often 95% intervals for clip fractions, length errors and accuracies contain the true value in simulations.

``python -m examples.lab.interval_coverage --write`` draws every regime 2,000 times and writes docs/reference/coverage.csv and
the table of docs/reference/coverage.md. The simulation and the true values use no code from `rlzoo.measure`.

Responses have 20 to 300 tokens, and the responses to a prompt have similar lengths. Long responses are less likely to have a
positive advantage. The probability of being clipped depends on the length alone. Within a prompt, decisions follow a
beta-binomial distribution with the stated correlation, and so do the decisions on one response across four epochs. The true
error is computed from the true clip fractions of the drawn length bins, weighted by the bins' shares of the drawn responses.
"""

from __future__ import annotations

import argparse
import csv
import re
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from math import comb, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import betaincinv, betaln, ndtr

from rlzoo.core.fairness import NUM_BINS, bin_edges
from rlzoo.measure.intervals import Clusters, mean_interval

Array = NDArray[Any]
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "coverage.md"
DRAWS = 2000
ROUNDING = 1e-12
LENGTHS = np.arange(20, 301)
LOG_MEDIAN, BETWEEN, WITHIN = np.log(80), 0.5, 0.35  # of the log of the length; deviations between and within prompts


def _share_by_length() -> Array:
    """Return the probability of each length. Responses outside the range count as 20 or 300 tokens."""
    ends = ndtr((np.log(np.append(LENGTHS - 0.5, 300.5)) - LOG_MEDIAN) / np.hypot(BETWEEN, WITHIN))
    ends[0], ends[-1] = 0, 1
    return np.asarray(np.diff(ends))


SHARE = _share_by_length()
RANK = np.cumsum(SHARE) - SHARE / 2  # rank of each length, between 0 and 1
POSITIVE = 0.65 - 0.3 * RANK  # probability of A > 0 by length


@dataclass(frozen=True)
class Regime:
    """Simulated responses."""

    prompts: int
    responses: int
    clip: float  # fraction of all responses that is clipped
    shape: str = "even"  # how this fraction depends on length
    correlation: float = 0.0  # between the decisions on the responses to a prompt
    epochs: int = 1
    within: float = 0.6  # correlation between the epochs of a response
    alike: bool = False  # whether the responses to a prompt have nearly the same length and often the same sign

    @property
    def name(self) -> str:
        """A description for the table."""
        parts = [f"{self.prompts} x {self.responses}", f"{self.clip:.0%}", self.shape]
        parts += [f"correlation {self.correlation}"] if self.correlation else []
        parts += [f"{self.epochs} epochs ({self.within})"] if self.epochs > 1 else []
        parts += ["prompts of one length"] if self.alike else []
        return ", ".join(parts)

    @property
    def chance(self) -> Array:
        """The probability of being clipped, by length."""
        shapes: dict[str, Array] = {"even": np.ones_like(RANK), "linear": 2 * RANK, "longest": 6.0 * (RANK > 5 / 6)}
        shape = shapes[self.shape]
        return np.asarray(self.clip * shape / (SHARE @ shape))

    def draw(self, number: int) -> tuple[Array, ...]:
        """Draw rows with the given number as the seed. A row holds a length, a decision, a prompt, and whether A > 0."""
        rng = np.random.default_rng([number, zlib.crc32(self.name.encode())])
        size = (self.prompts, self.responses)
        within = 0.03 if self.alike else WITHIN
        between = sqrt(BETWEEN**2 + WITHIN**2 - within**2)
        logs = LOG_MEDIAN + between * rng.standard_normal((self.prompts, 1)) + within * rng.standard_normal(size)
        lengths = np.clip(np.rint(np.exp(logs)), 20, 300).astype(int)
        right = POSITIVE[lengths - 20]
        if self.alike:
            right = _beta(right, 0.5, np.broadcast_to(rng.random((self.prompts, 1)), size))
        positive = rng.random(size) < right
        chance = self.chance[lengths - 20]
        if self.correlation:
            chance = _beta(chance, self.correlation, np.broadcast_to(rng.random((self.prompts, 1)), size))
        if self.epochs > 1:
            chance = (rng.random(size) < chance) if self.within == 1 else _beta(chance, self.within, rng.random(size))
        clipped = rng.random((*size, self.epochs)) < chance[..., None]
        columns = (lengths[..., None], clipped, np.arange(self.prompts)[:, None, None], positive[..., None])
        length, clipped, prompt, positive = (np.broadcast_to(column, clipped.shape).ravel() for column in columns)
        return length, clipped.astype(float), prompt, positive

    def truth(self, edges: Array, share: Array) -> tuple[Array, float, float]:
        """Return the true clip fractions of the bins and the largest and mean length errors for the bins' shares."""
        inside = (np.searchsorted(edges[1:-1], LENGTHS) == np.arange(NUM_BINS)[:, None]) * SHARE
        fraction = inside @ self.chance / np.maximum(inside.sum(1), 1e-300)
        error = np.abs(fraction - share @ fraction) / (1 - share @ fraction) * (share > 0)
        return fraction, float(error.max()), float(share @ error)


def _beta(mean: Array, correlation: float, quantile: Array) -> Array:
    size = 1 / correlation - 1
    with np.errstate(all="ignore"):
        drawn = betaincinv(size * mean, size * (1 - mean), quantile)
    return np.where(mean <= 0, 0.0, np.nan_to_num(drawn))


REGIMES = [
    *(Regime(*size, 0.1) for size in ((8, 4), (12, 4), (16, 4), (16, 8), (64, 8))),
    Regime(16, 8, 0.0),
    Regime(16, 8, 0.01),
    Regime(16, 8, 0.01, "linear"),
    Regime(16, 8, 0.01, "linear", 0.3),
    Regime(16, 8, 0.06, "linear"),
    Regime(16, 8, 0.1, "linear", 0.3),
    Regime(64, 8, 0.01, "longest"),
    Regime(64, 8, 0.06, "longest"),
    Regime(160, 8, 0.06, "longest"),
    Regime(64, 8, 0.02, "linear"),
    Regime(64, 8, 0.1, "linear"),
    Regime(64, 8, 0.1, "linear", 0.3),
    Regime(160, 8, 0.1, "linear"),
    Regime(6, 16, 0.3),
    Regime(12, 16, 0.3, "linear", 0.3),
    Regime(16, 8, 0.01, epochs=4),
    Regime(16, 8, 0.02, "linear", epochs=4),
    Regime(64, 8, 0.02, epochs=4),
    Regime(64, 8, 0.1, "linear", epochs=4),
    *(Regime(16, 8, 0.03, "longest", correlation, epochs) for correlation, epochs in ((0.0, 1), (0.3, 4))),
    *(Regime(*size, 0.1, alike=True) for size in ((8, 4), (12, 4), (16, 4), (16, 8))),
    *(Regime(prompts, 8, 0.01, "longest", 0.3, alike=True) for prompts in (64, 160)),
    Regime(16, 8, 0.06, "longest", 0.3, alike=True),
]


@dataclass(frozen=True)
class Problems:
    """Simulated evaluations, in which the probability of solving a problem follows a beta distribution with this mean."""

    problems: int
    mean: float
    j: int = 1  # pass@j of k
    k: int = 4
    spread: float = 1.0  # sum of the beta distribution's parameters

    @property
    def name(self) -> str:
        """A description for the table."""
        name = f"mean@{self.k}" if self.j == 1 else f"pass@{self.j}"
        return f"{name}, {self.problems} problems, success {self.mean:.0%}"

    def draw(self, number: int) -> Array:
        """Return each problem's pass@j, using the given number as the seed."""
        rng = np.random.default_rng([number, zlib.crc32(self.name.encode())])
        chance = rng.beta(self.mean * self.spread, (1 - self.mean) * self.spread, self.problems)
        wrong = self.k - rng.binomial(self.k, chance)
        return 1 - np.array([comb(int(count), self.j) for count in wrong]) / comb(self.k, self.j)

    @property
    def truth(self) -> float:
        """The true pass@j."""
        a, b = self.mean * self.spread, (1 - self.mean) * self.spread
        return 1 - float(np.exp(betaln(a, b + self.j) - betaln(a, b)))


EVALUATIONS = [
    *(Problems(number, mean) for number in (6, 8, 30) for mean in (0.1, 0.5, 0.9)),
    *(Problems(number, 0.1, 4) for number in (8, 30)),
    *(Problems(40, mean, 4, 8) for mean in (0.1, 0.5, 0.9)),
    Problems(30, 0.05, 1, 16),
    Problems(200, 0.5, 1, 16),
]


@dataclass
class Counts:
    """Results for one statistic, summed over draws."""

    printed: int = 0
    covered: int = 0
    width: float = 0.0
    above_zero: int = 0  # number of intervals that exclude 0

    def add(self, low: float, high: float, truth: float) -> None:
        """Count one interval."""
        self.printed += 1
        self.covered += low - ROUNDING <= truth <= high + ROUNDING
        self.width += high - low
        self.above_zero += low > ROUNDING


def measure(regime: Regime | Problems, draws: int) -> dict[str, Counts]:
    """Return the results by statistic. ``bin <k>`` is the clip fraction of a length bin."""
    if isinstance(regime, Problems):
        of_mean = Counts()
        for number in range(draws):
            values = regime.draw(number)
            rows = np.full(len(values), regime.k if regime.j == 1 else 1)
            of_mean.add(*mean_interval(values * rows, rows), regime.truth)
        return {"accuracy": of_mean}
    counts = {name: Counts() for name in ("lre_max", "lre_mean", *(f"bin {k}" for k in range(NUM_BINS)))}
    for number in range(draws):
        lengths, clipped, prompts, positive = regime.draw(number)
        edges = bin_edges(torch.tensor(lengths)).numpy()
        bins = np.searchsorted(edges[1:-1], lengths.astype(np.float32))
        share = np.bincount(bins, minlength=NUM_BINS) / len(bins)
        fraction, worst, mean = regime.truth(edges, share)
        clusters = Clusters.of(bins, clipped, prompts, positive)
        for k, (low, high) in enumerate(zip(*clusters.proportions(), strict=True)):
            if share[k] > 0:
                counts[f"bin {k}"].add(low, high, fraction[k])
        if errors := clusters.reweighting():
            counts["lre_max"].add(*errors.conditional.max.interval, worst)
            counts["lre_mean"].add(*errors.conditional.mean.interval, mean)
    return counts


def rows(regime: Regime | Problems, counts: dict[str, Counts], draws: int) -> Iterator[dict[str, str]]:
    """Yield the rows of the table for one regime. The row for clip fractions reports the bin with the lowest coverage."""
    of_bins = [counts.pop(name) for name in list(counts) if name.startswith("bin ")]
    if of_bins:
        counts["clip fraction, worst bin"] = min(of_bins, key=lambda of_bin: of_bin.covered / of_bin.printed)
        mean_width = sum(of_bin.width for of_bin in of_bins) / sum(of_bin.printed for of_bin in of_bins)
    for statistic, sums in counts.items():
        coverage = sums.covered / sums.printed
        is_bins = statistic.startswith("clip")
        even = isinstance(regime, Regime) and regime.shape == "even" and not is_bins
        yield {
            "regime": regime.name,
            "statistic": statistic,
            "draws": str(draws),
            "printed": f"{sums.printed / draws:.3f}",
            "coverage": f"{coverage:.3f}",
            "error": f"{sqrt(max(coverage * (1 - coverage), 1 / draws) / sums.printed):.4f}",
            "width": f"{mean_width if is_bins else sums.width / sums.printed:.4f}",
            "false alarms": f"{sums.above_zero / sums.printed:.3f}" if even else "",
        }


def _job(task: tuple[Regime | Problems, int]) -> list[dict[str, str]]:
    torch.set_num_threads(1)
    regime, draws = task
    return list(rows(regime, measure(regime, draws), draws))


def write(table: Sequence[dict[str, str]], page: Path) -> None:
    """Write the table into the page and into a CSV file beside it.

    Columns that begin with "before" are kept from the existing file.
    """
    file = page.with_suffix(".csv")
    with file.open(newline="") as stream:
        kept = {(row["regime"], row["statistic"]): row for row in csv.DictReader(stream)}
    names = ("before coverage", "before width", "before false alarms")
    table = [row | {name: kept.get((row["regime"], row["statistic"]), {}).get(name, "") for name in names} for row in table]
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, table[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
    page.write_text(re.sub(r"(?m)(^\|.*\n)+", lambda _: "\n".join(markdown(table)) + "\n", page.read_text(), count=1))


def markdown(table: Sequence[dict[str, str]]) -> Iterator[str]:
    """Yield the lines of the page's table."""
    yield "| regime | statistic | before | now | Monte-Carlo error | width, now / before | false alarms before | now |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in table:
        old = row.get("before width", "")
        ratio = f"{float(row['width']) / float(old):.2f}" if old and float(old) > 1e-3 else ""
        cells = (row["regime"], f"`{row['statistic']}`" if row["statistic"].startswith("lre") else row["statistic"])
        cells += (row.get("before coverage", ""), row["coverage"], row["error"], ratio)
        yield f"| {' | '.join((*cells, row.get('before false alarms', ''), row['false alarms']))} |".replace("|  |", "| |")


def main() -> None:
    """Print or write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="", help="regular expression for the regimes to draw")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    regimes: list[Regime | Problems] = [*REGIMES, *EVALUATIONS]
    tasks = [(regime, options.draws) for regime in regimes if re.search(options.only, regime.name)]
    table: list[dict[str, str]] = []
    with ProcessPoolExecutor(options.processes) as pool:
        for of_regime in pool.map(_job, tasks):
            print(*markdown(of_regime), sep="\n", flush=True)
            table += of_regime
    if options.write:
        write(table, PAGE)


if __name__ == "__main__":
    main()
