"""The fit of the length law finds the variances that generated the data, and its prediction fails if the law does not hold."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from examples.lab.length_law import LENGTHS
from examples.lab.length_law_fit import MODELS, SPLITS, Fit, Windows, clipped, error, width
from examples.lab.length_law_texts import Batch, analysed, binomial_intervals, stratified, summed_token_variances

SIGMA, TAU = 0.02, 0.001  # they are equal at 400 tokens


def drawn(num_documents, seed, *, sigma=SIGMA, tau=TAU):
    """Draw windows of documents whose tokens are independent except for a drift per document."""
    rng = np.random.default_rng(seed)
    documents, lengths, totals = [], [], []
    for document in range(num_documents):
        tokens = sigma * rng.normal(size=2048) + tau * rng.normal()
        sums = np.concatenate([[0.0], tokens.cumsum()])
        for length in LENGTHS:
            starts = np.arange(min(2048 // length, 8)) * length
            documents += [document] * len(starts)
            lengths += [length] * len(starts)
            totals += (sums[starts + length] - sums[starts]).tolist()
    return Windows(np.array(documents), np.array(lengths, dtype=float), np.array(totals))


@pytest.fixture(scope="module")
def many():
    return drawn(1500, 0)


def fitted(windows, split="between"):
    chosen = SPLITS[split](windows.lengths)
    return Fit.of(windows.lengths[chosen], windows.variances()[chosen]), chosen


@pytest.mark.parametrize("split", list(SPLITS))
def test_the_fit_finds_both_variances(many, split):
    fit, _ = fitted(many, split)
    assert fit.a**0.5 == pytest.approx(SIGMA, rel=0.03)
    assert fit.b**0.5 == pytest.approx(TAU, rel=0.12)
    assert fit.crossover == pytest.approx((SIGMA / TAU) ** 2, rel=0.25)


def test_only_the_complete_law_predicts_held_out_lengths(many):
    fit, chosen = fitted(many, "beyond")
    left_out = many.lengths[~chosen]
    errors = {model: error(fit.variance(model, left_out), many.variances()[~chosen]) for model in MODELS}
    assert errors["a L + b L^2"] < 0.15 < min(errors["a L"], errors["b L^2"])


def test_independent_tokens_have_no_common_part():
    fit, _ = fitted(drawn(1500, 1, tau=0.0))
    assert fit.b**0.5 < 0.2 * TAU
    assert fit.power[1] == pytest.approx(1.0, abs=0.02)


@pytest.mark.long
def test_a_band_clips_a_tenth_evenly_only_with_the_right_power(many):
    constant, straight = (clipped(many, width(many, power), power) for power in (0.0, 1.0))
    assert constant.mean() == pytest.approx(0.1, abs=0.005)
    assert straight.mean() == pytest.approx(0.1, abs=0.005)
    assert constant[0] < 0.01 < 0.3 < constant[-1]
    assert straight[0] > 0.3 > 0.01 > straight[-1]
    alone = drawn(1500, 2, tau=0.0)
    assert clipped(alone, width(alone, 0.5), 0.5) == pytest.approx([0.1] * len(LENGTHS), abs=0.025)


@pytest.mark.long
def test_the_interval_of_sigma_has_its_coverage():
    held = []
    for seed in range(40):
        windows, rng = drawn(24, 100 + seed), np.random.default_rng(seed)
        roots = [fitted(windows.resampled(rng))[0].a ** 0.5 for _ in range(100)]
        low, high = np.quantile(roots, [0.025, 0.975])
        held.append(low <= SIGMA <= high)
    assert np.mean(held) >= 0.8  # 36 of 40: percentiles of 24 documents are a little too narrow


def written(number, deviations, *, drift=0.0):
    """Draw the token log-ratios of texts of every length; ``deviations`` has the deviation at every position."""
    rng = np.random.default_rng(3)
    batches, log_ratios = [], {}
    for place, length in enumerate(LENGTHS):
        batches.append(Batch(str(length), length, place, []))
        drifts = drift * rng.normal(size=(number, 1))
        log_ratios[str(length)] = deviations[:length] * rng.normal(size=(number, length)) + drifts
    return log_ratios, batches


def share_held(row):
    held, of = (sum(int(row[f"held by {band}"].split(" of ")[i]) for band in ("constant", "sqrt(L)", "L")) for i in (0, 1))
    return held / of


@pytest.mark.long
def test_token_variances_predict_texts_whose_beginning_moves_further_and_the_law_does_not():
    deviations = np.where(np.arange(2048) < 32, 0.1, 0.01)
    law, tokens = analysed("mean", *written(300, deviations))
    assert law["error"] > 3 * tokens["error"]
    assert tokens["error"] < 1.5 * tokens["sampling_error"]
    assert share_held(tokens) >= 0.9 > share_held(law)


@pytest.mark.long
def test_the_law_predicts_texts_with_a_common_drift_and_token_variances_do_not():
    law, tokens = analysed("sum", *written(300, np.full(2048, 0.02), drift=0.002))
    assert tokens["error"] > 3 * law["error"]
    assert share_held(law) >= 0.9 > share_held(tokens)


def test_token_variances_are_summed_over_the_texts_that_reach_a_position():
    rows = [np.array([1.0, 2.0]), np.array([3.0, 4.0, 5.0]), np.array([5.0, 9.0, 7.0])]
    assert summed_token_variances(rows, np.array([1.0, 2.0, 3.0])) == pytest.approx([4.0, 4.0 + 13.0, 4.0 + 13.0 + 2.0])


def test_a_resample_keeps_the_number_of_texts_of_each_length():
    windows = Windows(np.arange(5), np.array([16.0, 16.0, 32.0, 32.0, 32.0]), np.arange(5.0))
    resampled = stratified(windows, np.random.default_rng(0))
    assert sorted(resampled.length) == sorted(windows.length)
    assert {total < 2 for total, length in zip(resampled.total, resampled.length, strict=True) if length == 16} == {True}


def test_the_interval_of_a_clip_rate_is_exact():
    windows = Windows(np.arange(300), np.repeat([16.0, 32.0, 64.0], 100), np.zeros(300))
    low, high = binomial_intervals(np.array([0.0, 0.1, 1.0]), windows)
    # none of 100: (1 - p)^100 = .025; ten of 100: quantiles of Beta(10, 91) and Beta(11, 90)
    assert low == pytest.approx([0.0, stats.beta.ppf(0.025, 10, 91), 0.025**0.01])
    assert high == pytest.approx([1 - 0.025**0.01, stats.beta.ppf(0.975, 11, 90), 1.0])


@pytest.mark.long
def test_the_law_of_a_reasoning_model_is_measured_on_whole_answers(tmp_path):
    words = ["embedded", "--output", str(tmp_path), "--texts", "40", "--max-tokens", "48"]
    command = [sys.executable, "-m", "examples.lab.reasoning_law", *words]
    out = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=200, check=True).stdout
    answers = json.loads((tmp_path / "measured-0.json").read_text())
    with (tmp_path / "reasoning-law.csv").open() as file:
        rows = list(csv.DictReader(file))
    whole = [row for row in rows if row["whole"] == "True"]
    assert [int(row["length"]) for row in whole] == [len(response) for _, response in answers]
    assert f"{sum(len(response) == 48 for _, response in answers)} of 40 measured answers cut off" in out
    ratios = [np.load(tmp_path / f"mean-{n}.npy") - np.load(tmp_path / f"base-{n}.npy") for n in range(40)]
    assert [float(row["mean"]) for row in whole] == pytest.approx([ratio.sum() for ratio in ratios], rel=1e-4, abs=1e-4)
    with (tmp_path / "reasoning-law-positions.csv").open() as file:
        tenth = list(csv.DictReader(file))[9]
    there = [ratio[9] for ratio in ratios if len(ratio) > 9]
    assert (int(tenth["answers"]), float(tenth["mean"])) == (len(there), pytest.approx(np.var(there, ddof=1), rel=1e-3))


@pytest.mark.long
def test_the_command_measures_texts_and_resumes(tmp_path):
    def run():
        command = [sys.executable, "-m", "examples.lab.length_law_texts", "--output", str(tmp_path), "--quick"]
        done = subprocess.run(
            command, cwd=Path(__file__).parents[2], env=os.environ, capture_output=True, text=True, timeout=200, check=True
        )
        return done.stdout, [(tmp_path / name).read_text() for name in ("length-law-texts.csv", "length-law-texts-fit.csv")]

    out, files = run()
    assert "sampled texts-181-0.json" in out
    assert files[0].count("\n") == 181
    assert files[1].count("\n") == 7
    (tmp_path / "mean-64-0.npy").unlink()
    again, same = run()
    assert "sampled" not in again
    assert same == files
