"""The numbers of docs/explanation/reasoning-model.md, recomputed from its CSV file."""

import csv
import re
from pathlib import Path

import numpy as np
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "reasoning-model.md"
UPDATES = {"random": "random", "policy gradient, mean over tokens": "mean", "policy gradient, sum over tokens": "sum"}


@pytest.mark.parametrize("label", UPDATES)
def test_spreads_and_exponents_follow_from_the_answers(label):
    text = PAGE.read_text()
    lengths = [int(word) for word in re.search(r"\| update \|([\d |]+)\| exponent", text)[1].split("|")]
    row = next(line for line in text.splitlines() if line.startswith(f"| {label} |"))
    *spreads, exponent = row.strip("| ").split(" | ")[1:]
    with (PAGE.with_suffix("") / "reasoning-law.csv").open() as file:
        rows = list(csv.DictReader(file))
    sums = [np.array([float(row[UPDATES[label]]) for row in rows if int(row["length"]) == length]) for length in lengths]
    expected = [values.std(ddof=1) for values in sums]
    assert [float(word) for word in spreads] == pytest.approx(expected, abs=6e-4)
    slope = np.polyfit(np.log(lengths), np.log(expected), 1)[0]
    value, low, high = (float(word) for word in re.findall(r"\.\d+", exponent))
    assert value == pytest.approx(slope, abs=0.006)
    rng, answers = np.random.default_rng(1), sorted({row["answer"] for row in rows})
    of_answer = {a: {int(r["length"]): float(r[UPDATES[label]]) for r in rows if r["answer"] == a} for a in answers}
    drawn = []
    for _ in range(2000):
        chosen = [of_answer[answers[number]] for number in rng.integers(len(answers), size=len(answers))]
        deviations = [np.std([one[length] for one in chosen if length in one], ddof=1) for length in lengths]
        drawn.append(np.polyfit(np.log(lengths), np.log(deviations), 1)[0])
    assert [low, high] == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.02)
