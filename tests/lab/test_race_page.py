"""Every number on the page of the race follows from the result files; nothing here uses the race's own code."""

import json
import re
from pathlib import Path
from statistics import fmean, median

import numpy as np
import pytest
from scipy import stats

DOCS = Path(__file__).parents[2] / "docs"
TRACKS = sorted({file.parent.name for file in DOCS.glob("results/*/*.json")})
CONTROL = "grpo"


def read(track):
    return {file.stem: json.loads(file.read_text()) for file in DOCS.glob(f"results/{track}/*.json")}


def section(track):
    page = (DOCS / "reference" / "race.md").read_text()
    return page.partition(f"<!-- generated: race {track} -->")[2].partition("<!-- end -->")[0].strip().splitlines()


def rows(lines, first_column):
    """Return the cells of the table that begins with these columns, by rule and column."""
    start = next(number for number, line in enumerate(lines) if line.startswith(first_column))
    names = [name.strip() for name in lines[start].strip("|").split("|")]
    found = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        found[cells[0].strip("`")] = dict(zip(names, cells, strict=True))
    return found


def score(run):
    if run.get("failure"):
        return 0.0
    if run.get("right"):
        return sum(int(digit) / run["num_samples"] for digit in run["right"]) / len(run["right"])
    return fmean(run["rewards"])


def by_seed(result):
    return np.array([score(run) for run in sorted(result["runs"], key=lambda run: run["seed"])])


def by_rate(result):
    rates = sorted({run["learning_rate"] for run in result["tuning"]})
    return {rate: fmean(score(run) for run in result["tuning"] if run["learning_rate"] == rate) for rate in rates}


def numbers(cell):
    return [float(number.replace(",", "")) for number in re.findall(r"[-+]?\d[\d,]*\.?\d*(?:e-?\d+)?", cell)]


@pytest.mark.parametrize("track", TRACKS)
def test_scores_and_conditions(track):
    results, table = read(track), rows(section(track), "| rule | reward")
    assert table.keys() == results.keys()
    rewards = [numbers(row["reward"])[0] for row in table.values()]
    assert rewards == sorted(rewards, reverse=True)
    for rule, row in table.items():
        result, runs = results[rule], results[rule]["runs"]
        scores, means = by_seed(result), by_rate(result)
        starts = np.array([run.get("start", 0.0) for run in sorted(runs, key=lambda run: run["seed"])])
        ended = [run for run in runs if not run.get("failure")]
        best = min(rate for rate, mean in means.items() if mean == max(means.values()))
        place = list(means).index(best)
        beside = list(means.values())[max(0, place - 1) : place + 2]
        assert {run["learning_rate"] for run in runs} == {best}
        expected = {
            "reward": (scores.mean(), 4),
            "below start": (sum(scores < starts), 0),
            "collapsed": (sum(scores < starts / 2) + sum(bool(run.get("failure")) for run in runs if not run.get("start")), 0),
            "best lr": (best, 9),
            "loss beside": (max(beside) - min(beside), 3),
            "clipped": (fmean(run["clip_fraction"] for run in ended), 3),
            "entropy": (fmean(run["entropy"] for run in ended), 3),
            "length": (fmean(run["length"] for run in ended), 1),
            "tokens": (fmean(run["tokens"] for run in runs), 0),
            "time": (median(result["step_seconds"]) / median(result["reference_step_seconds"]), 2),
        }
        if all("right" in run for run in ended):
            solved = [np.mean([digit != "0" for digit in run.get("right", "0")]) for run in runs]
            expected["solved"] = fmean(solved), 3
        for name, (value, digits) in expected.items():
            assert numbers(row[name])[0] == pytest.approx(value, abs=0.51 * 10**-digits), (rule, name)
        assert row["best lr"].endswith("(edge)") == (place in (0, len(means) - 1)), rule
        evenness = result["evenness"]
        printed = [evenness[name] for name in ("length_error",) if name in evenness] + evenness.get("interval", [])
        assert numbers(row["length error [95%]"]) == pytest.approx(printed, abs=0.00051), rule


@pytest.mark.parametrize("track", TRACKS)
def test_differences_and_what_they_show(track):
    results, lines = read(track), section(track)
    table, scores = rows(lines, "| rule | reward"), {rule: by_seed(result) for rule, result in results.items()}
    others = [rule for rule in scores if rule != CONTROL]
    p_values, deviations = {}, []
    for rule in others:
        gap = scores[rule] - scores[CONTROL]
        ends = stats.t.interval(1 - 0.05 / len(others), len(gap) - 1, gap.mean(), stats.sem(gap))
        shown = numbers(table[rule][f"minus {CONTROL} [simultaneous 95%]"])
        assert shown == pytest.approx([gap.mean(), *ends], abs=0.00051), rule
        p_values[rule] = stats.ttest_rel(scores[rule], scores[CONTROL]).pvalue
        deviations.append(gap.std(ddof=1))
    better, worse = [], []
    for rank, rule in enumerate(sorted(others, key=p_values.get)):
        if p_values[rule] * (len(others) - rank) > 0.05:
            break
        (better if scores[rule].mean() > scores[CONTROL].mean() else worse).append(rule)
    level = 0.05 / (len(scores) - 1)

    def beats(one, other):
        return stats.ttest_rel(scores[one], scores[other], alternative="greater").pvalue <= level

    leaders = [rule for rule in table if not any(beats(other, rule) for other in table if other != rule)]
    said = lines[0]
    number = f"{len(leaders)} of {len(scores)}"
    assert said.startswith(f"{number} rules cannot be distinguished from the best one: {', '.join(leaders)}.")
    assert f" Compared with {CONTROL}, shown to be better: {len(better)}; shown to be worse: {len(worse)} (" in said
    # the difference that is said to be detectable is detected with a probability of 80%
    degrees = len(scores[CONTROL]) - 1
    printed = numbers(said.partition("detects a difference")[2])[0]
    critical = stats.t.ppf(1 - 0.05 / len(others) / 2, degrees)
    shifts = np.array([printed - 0.00051, printed + 0.00051]) * np.sqrt(degrees + 1) / median(deviations)
    low, high = stats.nct.sf(critical, degrees, shifts)
    assert low < 0.8 < high


@pytest.mark.parametrize("track", TRACKS)
def test_learning_rates_and_origin(track):
    results, lines = read(track), section(track)
    for rule, row in rows(lines, "| rule | settings").items():
        tried = numbers(row["learning rate: mean reward of the tuning runs"])
        expected = [number for pair in by_rate(results[rule]).items() for number in pair]
        assert tried == pytest.approx(expected, abs=0.00051), rule
    dates = sorted(result["date"] for result in results.values())
    assert f"Made from {dates[0]} to {dates[-1]} on " in lines[-1]
    for result in results.values():
        assert result["processor"] in lines[-1]
        assert f"torch {result['facts']['version of torch']}" in lines[-1]
