"""Prints the headline numbers of docs/explanation/which-rule-wins.md from its CSV files.

``python -m examples.lab.headlines docs/explanation/which-rule-wins`` prints each number with its 95% interval. Runs with the
same seed see the questions in the same order, so their values are averaged first. The interval is then Student's t interval
over seeds. The docstring of `rlzoo.measure.comparison.estimate` states the interval's simulated coverage.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from rlzoo.measure.comparison import t_interval
from rlzoo.measure.intervals import Interval

Row = Mapping[str, str]
SUMMING = ("fspo", "fspo-adaptive", "rloo")  # learners whose gradient sums over the tokens of a response
AVERAGING = ("gspo", "grpo")  # learners that give every response the same weight


@dataclass(frozen=True, slots=True)
class Headline:
    """A number on the page."""

    what: str
    value: float
    interval: Interval | None  # 95% interval
    number: int  # number of seeds

    def __str__(self) -> str:
        ends = "" if self.interval is None else f" [{self.interval[0]:+.3f}, {self.interval[1]:+.3f}]"
        return f"{self.what}: {self.value:+.3f}{ends} ({self.number} seeds)"


def read(file: Path) -> list[Row]:
    """Return the rows of a CSV file."""
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def over_seeds(what: str, by_seed: Mapping[int, Iterable[float]]) -> Headline:
    """Return the mean over seeds of the per-seed means."""
    means = np.array([fmean(values) for values in by_seed.values()])
    return Headline(what, float(means.mean()), t_interval(means), len(means))


def evenness(rows: Sequence[Row]) -> list[Headline]:
    """Return the differences in length error between rules, on the rollouts of summing and of averaging learners."""
    single = [row for row in rows if row["seed"] != "all" and row["part"] == "all"]

    def gap(part: str, matched: str, learners: Sequence[str], first: str, second: str) -> Headline:
        found: dict[int, list[float]] = {}
        cells = {(row["rollouts_of"], row["seed"], row["rule"]): row for row in single if row["matched"] == matched}
        for (made, seed, rule), row in cells.items():
            if rule == first and made in learners:
                found.setdefault(int(seed), []).append(float(row[part]) - float(cells[made, seed, second][part]))
        named = "summing" if learners == SUMMING else "averaging" if learners == AVERAGING else "all"
        return over_seeds(f"{first} - {second}, {part}, {matched}, rollouts of {named} learners", found)

    found = [
        gap(part, matched, learners, "fspo", other)
        for other in ("gspo", "rloo")
        for learners in (SUMMING, AVERAGING)
        for matched, part in (("overall", "total"), ("overall", "conditional"), ("by sign", "conditional"))
    ]
    everyone = (*SUMMING, *AVERAGING)
    found += [gap("conditional", "by sign", everyone, "fspo-adaptive", other) for other in ("fspo", "gspo", "rloo")]
    for name in ("conditional", "noise", "corrected"):
        values: dict[int, list[float]] = {}
        for row in single:
            if row["rule"] == "fspo-adaptive" and row["matched"] == "by sign":
                values.setdefault(int(row["seed"]), []).append(float(row[name]))
        found.append(over_seeds(f"fspo-adaptive, {name}", values))
    return found


def flat(rows: Sequence[Row]) -> dict[str, tuple[int, int]]:
    """Count, for each rule, the runs matched by sign: those with an error indistinguishable from 0, and all of them."""
    found: dict[str, tuple[int, int]] = {}
    for row in rows:
        if row["seed"] != "all" and row["part"] == "all" and row["matched"] == "by sign":
            held, number = found.get(row["rule"], (0, 0))
            found[row["rule"]] = (held + (float(row["conditional_low"]) == 0), number + 1)
    return found


def factorial(rows: Sequence[Row]) -> list[Headline]:
    """Return the differences in accuracy between bands and between clipping all gradient norms and clipping none."""
    scores: dict[str, dict[int, float]] = {}
    for row in rows:
        scores.setdefault(row["cell"], {})[int(row["seed"])] = float(row["accuracy"])

    def gap(first: str, second: str) -> Headline:
        ours, theirs = scores[first], scores[second]
        return over_seeds(f"{first} - {second}", {seed: [ours[seed] - theirs[seed]] for seed in ours if seed in theirs})

    bands = [cell.split("/")[0] for cell in scores if cell.endswith("/always") and not cell.startswith("no ceiling")]
    within = [
        gap(f"{first}/{norm}", f"{second}/{norm}")
        for norm in ("always", "never")
        for place, first in enumerate(bands)
        for second in bands[place + 1 :]
        if {f"{first}/{norm}", f"{second}/{norm}"} <= scores.keys()
    ]
    between: dict[int, list[float]] = {}
    for band in bands:
        without = scores.get(f"{band}/never", {})
        for seed, value in scores[f"{band}/always"].items():
            if seed in without:
                between.setdefault(seed, []).append(value - without[seed])
    dual = [gap("alpha-0.5/always", "no ceiling/always")] if "no ceiling/always" in scores else []
    return [*within, *dual, over_seeds("always - never, all bands", between)]


def staleness(rows: Sequence[Row]) -> list[Headline]:
    """Return the change in length error with response age, from updates 2 to 8 of a batch to updates 10 to 16."""
    found = []
    for rule in dict.fromkeys(row["rule"] for row in rows):
        by_seed: dict[int, list[float]] = {}
        for made in dict.fromkeys(row["rollouts_of"] for row in rows):
            for seed in dict.fromkeys(row["seed"] for row in rows if row["seed"] != "all"):
                own = [
                    r for r in rows if (r["rollouts_of"], r["seed"], r["rule"], r["matched"]) == (made, seed, rule, "by sign")
                ]
                errors = {int(r["part"].split()[1]): float(r["conditional"]) for r in own if r["part"] != "all"}
                late, early = (fmean(errors[update] for update in updates) for updates in (range(10, 17), range(2, 9)))
                by_seed.setdefault(int(seed), []).append(late - early)
        found.append(over_seeds(f"{rule}, updates 10 to 16 minus updates 2 to 8", by_seed))
    return found


def smollm2(rows: Sequence[Row]) -> list[Headline]:
    """Return the difference in accuracy between the two rules trained on SmolLM2."""
    scores = {(row["rule"], int(row["seed"])): float(row["accuracy"]) for row in rows}
    seeds = sorted({seed for _, seed in scores})
    return [over_seeds("fspo - gspo, SmolLM2", {seed: [scores["fspo", seed] - scores["gspo", seed]] for seed in seeds})]


SOURCES: dict[str, Callable[[Sequence[Row]], list[Headline]]] = {
    "evenness.csv": evenness,
    "factorial.csv": factorial,
    "staleness.csv": staleness,
    "smollm2-race.csv": smollm2,
}


def headlines(folder: Path) -> list[Headline]:
    """Return all headline numbers."""
    return [headline for name, numbers in SOURCES.items() for headline in numbers(read(folder / name))]


def main() -> None:
    """Print all headline numbers."""
    folder = Path(sys.argv[1])
    print(*headlines(folder), sep="\n")
    for rule, (held, number) in flat(read(folder / "evenness.csv")).items():
        print(f"{rule}: indistinguishable from even clipping on {held} of {number} runs")


if __name__ == "__main__":
    main()
