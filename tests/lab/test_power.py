"""The plan of a comparison says what it can detect, based on the known noise of seeds and evaluation."""

import pytest

from rlzoo.config.run_config import RunConfig
from rlzoo.core.errors import UserError
from rlzoo.lab.power import USUAL_DEVIATION, plan
from rlzoo.lab.runs import FinishedRun
from rlzoo.measure.comparison import detectable


def config(**settings):
    overrides = [f"eval.{name}={value}" for name, value in settings.items()]
    return RunConfig.compose(clip="fspo", overrides=overrides)


def record(policy, seed, accuracy, error=None):
    row = {"step": 1, "eval/accuracy": accuracy} | ({} if error is None else {"eval/accuracy_se": error})
    return FinishedRun(None, policy, seed, {"steps": 1, "eval.num_problems": 100, "eval.num_samples": 4}, (row,), {})


def test_a_plan_adds_the_variance_of_seeds_and_of_two_evaluations():
    # at accuracy .75, 1,000 x 3 responses have the error sqrt(.1875 / 3000) = .0079, a difference sqrt(2) times that: .01118
    found = plan(config(num_problems=1000, num_samples=3), 3, 5)
    assert found.evaluation_error == pytest.approx(0.0079057, rel=1e-4)
    assert (found.num_pairs, found.seed_deviation) == (3, USUAL_DEVIATION)
    assert found.detects == pytest.approx(detectable((USUAL_DEVIATION**2 + 0.011180**2) ** 0.5, 5, 3), rel=1e-4)


def test_more_seeds_and_fewer_pairs_detect_less():
    few, many, pair = (plan(config(num_problems=1000), *size).detects for size in ((4, 5), (4, 12), (2, 5)))
    assert many < pair < few


def test_finished_runs_give_the_deviation_of_paired_differences():
    # differences .02 .04 .06: deviation .02; each run's evaluation has the error .01, the difference sqrt(2) times that
    scores = {"a": (0.52, 0.64, 0.76), "b": (0.5, 0.6, 0.7)}
    records = [record(name, seed, value, 0.01) for name, values in scores.items() for seed, value in enumerate(values)]
    found = plan(config(num_problems=100, num_samples=4), 2, 5, records)
    assert found.seed_deviation == pytest.approx((0.02**2 - 2 * 0.01**2) ** 0.5)
    assert found.evaluation_error == pytest.approx(0.01)
    assert found.source == "measured on 6 finished runs"
    with pytest.raises(UserError, match="no two rules among the finished runs have evaluations for three common seeds"):
        plan(config(num_problems=100), 2, 5, records[:4])


def test_a_plan_without_power_is_refused():
    with pytest.raises(UserError, match="--power needs an evaluation, but eval"):
        plan(config(num_problems=0), 2, 5)
    with pytest.raises(UserError, match="it needs at least 2 rules and 2 seeds, not 1 and 5"):
        plan(config(num_problems=10), 1, 5)


def test_runs_of_one_rule_with_several_settings_are_several_contenders():
    # two settings of one rule: differences .02 .04 .06 between them, as above
    scores = {"1": (0.52, 0.64, 0.76), "2": (0.5, 0.6, 0.7)}
    records = [record("a", seed, value, 0.01) for values in scores.values() for seed, value in enumerate(values)]
    for place, each in enumerate(records):
        each.settings["learner.lr"] = place // 3
    found = plan(config(num_problems=100, num_samples=4), 2, 5, records)
    assert found.seed_deviation == pytest.approx((0.02**2 - 2 * 0.01**2) ** 0.5)
