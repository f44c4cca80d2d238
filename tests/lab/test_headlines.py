"""The headlines of docs/explanation/which-rule-wins.md, recomputed from its csv files without the lab's code."""

import csv
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from scipy import stats

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "explanation" / "which-rule-wins"
SUMMING, AVERAGING = ("fspo", "fspo-adaptive", "rloo"), ("gspo", "grpo")


def read(name):
    with (FOLDER / name).open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def runs():
    return [row for row in read("evenness.csv") if row["seed"] != "all" and row["part"] == "all"]


def paired(values):
    """Mean and 95 % interval of Student's t, from scipy."""
    low, high = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=stats.sem(values))
    return float(np.mean(values)), float(low), float(high)


def gap(runs, first, second, column, matched, learners):
    """The difference of two rules on the same rollouts: means of a seed's runs, then over seeds."""

    def error(rule, made, seed):
        (row,) = [r for r in runs if (r["rule"], r["rollouts_of"], r["seed"], r["matched"]) == (rule, made, seed, matched)]
        return float(row[column])

    seeds = sorted({row["seed"] for row in runs})
    return paired([fmean(error(first, made, seed) - error(second, made, seed) for made in learners) for seed in seeds])


def test_the_page_has_25_runs_of_five_rules(runs):
    assert len({(row["rollouts_of"], row["seed"]) for row in runs}) == 25
    assert all(abs(float(row["clip_fraction"]) - 0.1) < 0.01 for row in runs)


def test_pooled_fspo_is_less_even_than_gspo_on_the_rollouts_of_learners_that_sum_and_by_sign_more_even(runs):
    assert gap(runs, "fspo", "gspo", "total", "overall", SUMMING)[1] > 0
    assert gap(runs, "fspo", "gspo", "conditional", "by sign", SUMMING)[2] < 0
    assert gap(runs, "fspo", "gspo", "conditional", "by sign", AVERAGING)[2] < 0


def test_only_the_adaptive_band_cannot_be_told_from_flat(runs):
    found = [row for row in runs if row["matched"] == "by sign"]
    for rule in ("fspo", "gspo", "rloo"):
        assert all(float(row["conditional_low"]) > 0 for row in found if row["rule"] == rule)
    adaptive = [row for row in found if row["rule"] == "fspo-adaptive"]
    assert sum(float(row["conditional_low"]) == 0 for row in adaptive) >= 24
    assert fmean(float(row["conditional"]) for row in adaptive) < 1.1 * fmean(float(row["noise"]) for row in adaptive)


def test_the_mix_of_signs_makes_a_third_or_more_of_the_pooled_error_of_fixed_bands(runs):
    for rule in ("fspo", "gspo", "rloo"):
        rows = [row for row in runs if row["rule"] == rule and row["matched"] == "overall"]
        assert fmean(float(row["composition"]) for row in rows) > fmean(float(row["total"]) for row in rows) / 3


def test_no_exponent_of_the_band_is_above_another_and_norm_clipping_helps():
    scores = {}
    for row in read("factorial.csv"):
        scores.setdefault(row["cell"], {})[int(row["seed"])] = float(row["accuracy"])
    bands = ("alpha-0", "alpha-0.5", "alpha-1")
    for norm, bound in (("always", 0.0131), ("never", 0.04)):
        for first, second in ((0, 1), (0, 2), (1, 2)):
            ours, theirs = scores[f"{bands[first]}/{norm}"], scores[f"{bands[second]}/{norm}"]
            _, low, high = paired([ours[seed] - theirs[seed] for seed in range(8)])
            assert -bound < low < 0 < high < bound
    gains = [fmean(scores[f"{band}/always"][seed] - scores[f"{band}/never"][seed] for band in bands) for seed in range(8)]
    assert paired(gains)[1] > 0
