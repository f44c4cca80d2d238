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
    """Return the mean and the 95% interval of Student's t, from scipy."""
    low, high = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=stats.sem(values))
    return float(np.mean(values)), float(low), float(high)


def gap(runs, first, second, column, matched, learners):
    """Return the difference of two rules on the same rollouts: means over a seed's runs, then over seeds."""

    def error(rule, made, seed):
        (row,) = [r for r in runs if (r["rule"], r["rollouts_of"], r["seed"], r["matched"]) == (rule, made, seed, matched)]
        return float(row[column])

    seeds = sorted({row["seed"] for row in runs})
    return paired([fmean(error(first, made, seed) - error(second, made, seed) for made in learners) for seed in seeds])


def test_the_page_has_25_runs_of_five_rules(runs):
    assert len({(row["rollouts_of"], row["seed"]) for row in runs}) == 25
    assert all(abs(float(row["clip_fraction"]) - 0.1) < 0.01 for row in runs)


def test_pooled_fspo_is_less_even_than_gspo_on_the_rollouts_of_learners_that_sum_and_by_sign_it_is_not(runs):
    assert gap(runs, "fspo", "gspo", "total", "overall", SUMMING)[1] > 0
    by_sign, _, high = gap(runs, "fspo", "gspo", "conditional", "by sign", SUMMING)
    assert by_sign < -0.02
    assert high < 0.001
    assert gap(runs, "fspo", "gspo", "conditional", "by sign", AVERAGING)[2] < 0


def test_only_the_adaptive_band_is_indistinguishable_from_flat(runs):
    found = [row for row in runs if row["matched"] == "by sign"]
    for rule in ("fspo", "gspo", "rloo"):
        assert all(float(row["conditional_low"]) > 0 for row in found if row["rule"] == rule)
    adaptive = [row for row in found if row["rule"] == "fspo-adaptive"]
    assert sum(float(row["conditional_low"]) == 0 for row in adaptive) == 25
    assert fmean(float(row["conditional"]) for row in adaptive) < fmean(float(row["noise"]) for row in adaptive)
    pooled = [row for row in read("evenness.csv") if row["seed"] == "all" and row["matched"] == "by sign"]
    begins = {
        rule: {float(row["conditional_low"]) == 0 for row in pooled if row["rule"] == rule}
        for rule in ("fspo", "fspo-adaptive")
    }
    assert begins == {"fspo": {False}, "fspo-adaptive": {True}}


def test_the_mix_of_signs_makes_a_third_or_more_of_the_pooled_error_of_fixed_bands(runs):
    for rule in ("fspo", "gspo", "rloo"):
        rows = [row for row in runs if row["rule"] == rule and row["matched"] == "overall"]
        assert fmean(float(row["composition"]) for row in rows) > fmean(float(row["total"]) for row in rows) / 3


def test_no_exponent_of_the_band_is_above_another_and_norm_clipping_helps_more_than_an_exponent():
    scores = {}
    for row in read("factorial.csv"):
        scores.setdefault(row["cell"], {})[int(row["seed"])] = float(row["accuracy"])
    bands = ("alpha-0", "alpha-0.5", "alpha-1")
    for norm, bound in (("always", 0.012), ("never", 0.024)):
        for first, second in ((0, 1), (0, 2), (1, 2)):
            ours, theirs = scores[f"{bands[first]}/{norm}"], scores[f"{bands[second]}/{norm}"]
            _, low, high = paired([ours[seed] - theirs[seed] for seed in range(12)])
            assert -bound < low < 0 < high < bound
    gain = {
        band: paired([scores[f"{band}/always"][seed] - scores[f"{band}/never"][seed] for seed in range(12)])
        for band in (*bands, "adaptive")
    }
    assert {band for band, (_, low, _) in gain.items() if low < 0} == {"alpha-1", "adaptive"}
    mean = {cell: fmean(by_seed.values()) for cell, by_seed in scores.items()}
    for norm in ("always", "never"):
        fixed = [mean[f"{band}/{norm}"] for band in bands]
        assert max(fixed) - min(fixed) < 0.005 < 0.012 < min(fixed) - mean[f"adaptive/{norm}"]
    gains = [fmean(scores[f"{band}/always"][seed] - scores[f"{band}/never"][seed] for band in gain) for seed in range(12)]
    assert paired(gains)[1] > 0


def test_on_a_long_tail_the_square_root_overcorrects_and_the_adaptive_band_is_even():
    pooled = {
        (r["rollouts_of"], r["rule"]): r for r in read("long-evenness.csv") if (r["seed"], r["matched"]) == ("all", "by sign")
    }
    for made in ("fspo", "gspo", "rloo"):
        error = {rule: float(pooled[made, rule]["conditional"]) for rule in ("fspo", "gspo", "rloo", "fspo-adaptive")}
        assert error["fspo-adaptive"] < error["rloo"] < error["fspo"] < error["gspo"]
        assert float(pooled[made, "fspo-adaptive"]["conditional_low"]) == 0 < float(pooled[made, "rloo"]["conditional_low"])
        shortest, *_, longest = (float(value) for value in pooled[made, "fspo"]["clip_by_length"].split())
        assert 3.5 < shortest / longest < 12.5
    gains = {}
    for row in read("long-race.csv"):
        gains.setdefault(row["rule"], []).append(float(row["accuracy"]) - float(row["before"]))
    assert {rule: round(fmean(values), 3) for rule, values in gains.items()} == {"fspo": 0.066, "gspo": 0.029, "rloo": 0.102}
    (everything,) = [row for row in read("long-model.csv") if row["part"] == "all"]
    assert float(everything["pass@k"]) < 0.75


def test_the_dual_clip_makes_no_difference():
    scores = {}
    for row in read("factorial.csv"):
        scores.setdefault(row["cell"], {})[int(row["seed"])] = float(row["accuracy"])
    gaps = [scores["alpha-0.5/always"][seed] - scores["no ceiling/always"][seed] for seed in range(12)]
    value, low, high = paired(gaps)
    assert round(value, 3) == -0.003
    assert -0.0085 < low < 0 < high < 0.0025


def test_the_length_error_does_not_change_with_the_age_of_the_responses():
    rows = [row for row in read("staleness.csv") if row["part"] != "all" and row["seed"] != "all"]
    for rule, bound in (("fspo", 0.09), ("gspo", 0.11), ("rloo", 0.07), ("fspo-adaptive", 0.01)):
        gaps = []
        for seed in ("0", "1", "2"):
            own = [row for row in rows if (row["rule"], row["seed"]) == (rule, seed)]
            early, late = (
                fmean(fmean(float(r["conditional"]) for r in own if r["part"] == f"update {u}") for u in updates)
                for updates in (range(2, 9), range(10, 17))
            )
            gaps.append(late - early)
        _, low, high = paired(gaps)
        assert -bound < low < 0 < high < bound, rule


def test_masks_on_the_sum_drop_long_responses_first():
    kept = {}
    for row in read("masks.csv"):
        kept.setdefault(row["correction"], []).append(row)

    def mean(correction, column):
        return fmean(float(row[column]) for row in kept[correction])

    assert (round(mean("icepop-sum", "kept_0"), 2), round(mean("icepop-sum", "kept_5"), 2)) == (0.98, 0.79)
    assert (round(mean("length_fair", "kept_0"), 2), round(mean("length_fair", "kept_5"), 2)) == (0.92, 0.58)
    assert mean("icepop-mean", "kept") > 0.999
    gains = [float(a["reward"]) - float(b["reward"]) for a, b in zip(kept["length_fair"], kept["none"], strict=True)]
    value, low, _ = paired(gains)
    assert round(value, 3) == 0.053
    assert low > 0


def test_gspo_is_less_even_than_fspo_at_every_width_on_the_rollouts_of_gspo_and_grpo():
    errors = {(row["rollouts_of"], row["rule"], float(row["factor"])): float(row["lre_max"]) for row in read("widths.csv")}
    factors = (0.25, 0.5, 1, 2, 4)
    for made in ("gspo", "grpo"):
        assert all(errors[made, "gspo", factor] > errors[made, "fspo", factor] for factor in factors)
    apart = [errors["fspo", "gspo", factor] > errors["fspo", "fspo", factor] for factor in factors]
    assert apart == [True, False, False, True, True]
    assert len({rule for _, rule, _ in errors}) == 22


def test_the_length_law_holds_after_a_random_step_and_fails_after_a_gradient_step():
    fits = {row["step"]: row for row in read("length-law-fit.csv") if row["left_out"] == "between"}
    held = {
        step: sum(int(fit[f"held by {band}"].split(" of ")[0]) for band in ("constant", "sqrt(L)", "L"))
        for step, fit in fits.items()
    }
    assert held == {"random": 20, "sum": 13, "mean": 9}  # of 21
    assert float(fits["random"]["error of a L + b L^2"]) < 0.05 < 0.3 < float(fits["sum"]["error of a L + b L^2"])
    assert float(fits["random"]["tau_low"]) == 0 < min(float(fits[step]["tau_low"]) for step in ("mean", "sum"))


def test_the_variances_of_tokens_predict_2000_texts_and_the_square_root_does_not():
    fits = {(row["step"], row["model"]): row for row in read("length-law-texts-fit.csv")}
    texts = read("length-law-texts.csv")
    assert len(texts) == 2000
    totals = {
        (step, length): np.array([float(row[step]) for row in texts if int(row["length"]) == length])
        for step in ("random", "mean", "sum")
        for length in sorted({int(row["length"]) for row in texts})
    }
    held = {}
    for (step, model), fit in fits.items():
        lengths = [length for one, length in totals if one == step]
        tested = [int(length) for length in fit["tested"].split()]
        fitted = [int(length) for length in fit["fitted"].split()]
        assert sorted(tested + fitted) == lengths
        variances = [totals[step, length].var(ddof=1) for length in lengths]
        assert [float(value) for value in fit["variance"].split()] == pytest.approx(variances, rel=0.006)
        predicted = dict(zip(lengths, map(float, fit["predicted variance"].split()), strict=True))
        ratios = [np.log(predicted[length] / totals[step, length].var(ddof=1)) for length in tested]
        assert np.expm1(np.sqrt(np.mean(np.square(ratios)))) == pytest.approx(float(fit["error"]), abs=0.01)
        for band, power in (("constant", 0.0), ("sqrt(L)", 0.5), ("L", 1.0)):
            # the width at which a tenth of the texts of the fitted lengths are outside, with equal weight for all lengths
            scaled = np.concatenate([np.abs(totals[step, length]) / length**power for length in fitted])
            weights = np.concatenate([np.full(len(totals[step, length]), 1 / len(totals[step, length])) for length in fitted])
            order = np.argsort(-scaled)
            edge = scaled[order[np.searchsorted(np.cumsum(weights[order]) / len(fitted), 0.1)]]
            expected = dict(zip(lengths, map(float, fit[f"predicted clip by {band}"].split()), strict=True))
            for length in tested:
                outside, number = int((np.abs(totals[step, length]) > edge * length**power).sum()), len(totals[step, length])
                low = stats.beta.ppf(0.025, outside, number - outside + 1) if outside else 0.0
                high = stats.beta.ppf(0.975, outside + 1, number - outside)
                held[step, model] = held.get((step, model), 0) + (low <= expected[length] <= high)
    law, tokens = "a L + b L^2", "tokens"
    assert {step: held[step, law] for step in ("random", "mean", "sum")} == {"random": 21, "mean": 10, "sum": 11}
    assert {step: held[step, tokens] for step in ("random", "mean", "sum")} == {"random": 19, "mean": 21, "sum": 19}
    errors = {key: round(100 * float(fit["error"])) for key, fit in fits.items()}
    assert [errors[step, law] for step in ("random", "mean", "sum")] == [25, 210, 110]
    assert [errors[step, tokens] for step in ("random", "mean", "sum")] == [14, 16, 13]
    for step, growth in (("random", 11.0), ("mean", 3.8), ("sum", 4.7)):
        assert totals[step, 2048].std(ddof=1) / totals[step, 16].std(ddof=1) == pytest.approx(growth, abs=0.05)
    for step, share in (("mean", 0.23), ("sum", 0.27)):
        shortest, *_, longest = map(float, fits[step, law]["clip by sqrt(L)"].split())
        assert (round(shortest, 2), longest) == (share, 0.0)
        assert float(fits[step, law]["tau_high"]) == 0.0


def test_a_gradient_step_moves_the_first_tokens_and_a_random_step_does_not():
    first, *_, last = read("length-law-positions.csv")
    assert round(float(first["mean"]) / float(last["mean"])) == 9
    assert round(float(first["sum"]) / float(last["sum"])) == 4
    assert float(first["random"]) / float(last["random"]) < 1.5
    prefixes = read("length-law-prefixes.csv")
    assert len({row["document"] for row in prefixes}) == 36

    def deviation(step, length):
        return np.std([float(row[step]) for row in prefixes if row["length"] == str(length)], ddof=1)

    assert deviation("mean", 2048) / deviation("mean", 128) == pytest.approx(1.3, abs=0.05)
    assert deviation("sum", 2048) / deviation("sum", 128) == pytest.approx(1.8, abs=0.05)
    assert deviation("random", 2048) / deviation("random", 16) == pytest.approx(11.1, abs=0.1)


def test_responses_that_gave_the_gradient_move_with_their_advantage():
    own = read("length-law-own.csv")
    for step, power in (("mean", -0.16), ("sum", 0.69)):
        moved = [(int(row["length"]), float(row[step]) * np.sign(float(row["advantage"]))) for row in own]
        assert len(moved) == 32
        assert min(value for _, value in moved) > 0
        lengths = sorted({length for length, _ in moved})
        means = [fmean(value for length, value in moved if length == one) for one in lengths]
        assert np.polyfit(np.log(lengths), np.log(means), 1)[0] == pytest.approx(power, abs=0.01)


def test_the_fit_follows_from_the_recorded_windows():
    from examples.lab.length_law_fit import SPLITS, Fit
    from examples.lab.length_law_fit import read as windows_of

    for step, windows in windows_of(FOLDER / "length-law.csv").items():
        chosen = SPLITS["between"](windows.lengths)
        fit = Fit.of(windows.lengths[chosen], windows.variances()[chosen])
        (row,) = [r for r in read("length-law-fit.csv") if (r["step"], r["left_out"]) == (step, "between")]
        assert fit.a**0.5 == pytest.approx(float(row["sigma"]), rel=1e-3)


def test_two_rules_learn_equally_well_on_smollm2_and_only_gspo_is_uneven():
    scores = {(row["rule"], row["seed"]): float(row["accuracy"]) for row in read("smollm2-race.csv")}
    mean, low, high = paired([scores["fspo", str(seed)] - scores["gspo", str(seed)] for seed in range(5)])
    assert (mean, low, high) == pytest.approx((0.014, -0.024, 0.052), abs=0.0006)
    rows = read("smollm2-evenness.csv")
    pooled = [row for row in rows if row["seed"] == "all" and row["matched"] == "by sign"]
    assert len(pooled) == 8
    assert all((float(row["conditional_low"]) > 0) == (row["rule"] == "gspo") for row in pooled)
    for row in pooled:
        shares = [float(share) for share in row["clip_by_length"].split()]
        assert (shares[0] > 2 * shares[-1]) == (row["rule"] == "gspo" or (row["rule"], row["rollouts_of"]) == ("fspo", "fspo"))
    single = [row for row in rows if row["seed"] != "all" and row["part"] == "all"]
    mean, low, high = gap(single, "fspo", "gspo", "conditional", "by sign", ("fspo", "gspo"))
    assert (mean, low, high) == pytest.approx((-0.009, -0.026, 0.007), abs=0.0006)
