"""Which metrics MLflow is sent."""

import re

import pytest

from rlzoo import load_zoo
from rlzoo.tracking.rows import curves, is_curated

CONTRACT = [
    "reward/mean", "reward/std", "reward/zero_std_groups", "eval/accuracy", "response/length_mean", "response/truncated",
    "clip/fraction", "clip/fraction_low", "clip/fraction_high", "clip/fraction_dual", "clip/fraction_length_bin_0",
    "fairness/lre_max", "fairness/lre_mean", "fairness/ess", "fairness/ess_length_bin_5", "ratio/mu_token",
    "ratio/sigma_token", "ratio/log_ratio_min", "ratio/log_ratio_max", "learner/grad_norm", "learner/loss",
    "learner/entropy", "learner/kl_ref", "learner/lr", "throughput/tokens_per_second", "time/rollout", "time/learner",
]  # fmt: skip


@pytest.mark.parametrize("name", CONTRACT)
def test_a_metric_that_others_rely_on_is_sent(name):
    assert is_curated(name)


@pytest.mark.parametrize("name", load_zoo())
def test_the_metrics_to_watch_with_a_policy_are_sent(name):
    for metric in load_zoo()[name].watch:
        assert is_curated(re.sub(r"<k>", "0", metric)), metric


def test_ends_of_intervals_quantiles_and_most_of_what_is_by_length_are_not_curves():
    row = dict.fromkeys(
        [
            "step", "time/clock", "reward/mean", "clip/fraction_length_bin_0", "clip/fraction_length_bin_0_ci_low",
            "clip/fraction_negative_length_bin_0", "fairness/gradient_mass_length_bin_2", "fairness/lre_max_ci_high",
            "ratio/sigma_root_length_bin_1", "ratio/standardised_p05", "learner/objective", "clip/length_bin_3_edge",
        ],
        0.0,
    )  # fmt: skip
    assert set(curves(row, "curated")) == {"reward/mean", "clip/fraction_length_bin_0"}
    assert set(curves(row, "all")) == set(row) - {"step", "time/clock"}
