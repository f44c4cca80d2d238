"""The metrics that are logged to MLflow."""

import json
import re

import pytest
from mlflow import MlflowClient

from rlzoo import load_zoo
from rlzoo.journal.tracking.rows import LARGEST_CALL, Lines, Points, accepted_name, curves, is_curve
from rlzoo.journal.tracking.uploads import tracking_uri

CONTRACT = [
    "reward/mean", "reward/std", "reward/zero_std_groups", "eval/accuracy", "response/length_mean", "response/truncated",
    "clip/fraction", "clip/fraction_low", "clip/fraction_high", "clip/fraction_dual", "clip/fraction_length_bin_0",
    "fairness/lre_max", "fairness/lre_mean", "fairness/ess", "fairness/ess_length_bin_5", "ratio/mu_token",
    "ratio/sigma_token", "ratio/log_ratio_min", "ratio/log_ratio_max", "learner/grad_norm", "learner/loss",
    "learner/entropy", "learner/kl_ref", "learner/lr", "throughput/tokens_per_second", "time/rollout", "time/learner",
]  # fmt: skip


@pytest.mark.parametrize("name", CONTRACT)
def test_a_metric_that_other_code_relies_on_is_sent(name):
    assert is_curve(name)


@pytest.mark.parametrize("name", load_zoo())
def test_the_metrics_to_watch_with_a_policy_are_sent(name):
    for metric in load_zoo()[name].watch:
        assert is_curve(re.sub(r"<k>", "0", metric)), metric


def test_interval_bounds_and_most_metrics_by_length_are_not_curves():
    row = dict.fromkeys(
        [
            "step", "time/clock", "reward/mean", "clip/fraction_length_bin_0", "clip/fraction_length_bin_0_ci_low",
            "clip/fraction_negative_length_bin_0", "fairness/gradient_mass_length_bin_2", "fairness/lre_max_ci_high",
            "ratio/sigma_root_length_bin_1", "learner/objective", "clip/length_bin_3_edge",
        ],
        0.0,
    )  # fmt: skip
    assert set(curves(row)) == {"reward/mean", "clip/fraction_length_bin_0"}


@pytest.mark.timeout(60)
def test_a_row_larger_than_a_call_is_sent_and_so_are_those_after_it(tmp_path):
    sizes = [5, LARGEST_CALL + 1, 5]
    rows = [{"step": step, "time/clock": 1.0, **{f"m{k}": 1.0 for k in range(size)}} for step, size in enumerate(sizes)]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    client = MlflowClient(tracking_uri())
    run_id = client.create_run(client.create_experiment("wide")).info.run_id
    assert Points(client, run_id).send(Lines(file).added()) == 3
    assert len(client.get_run(run_id).data.metrics) == LARGEST_CALL + 1
    assert [metric.step for metric in client.get_metric_history(run_id, "m0")] == [0, 1, 2]


NAMES = [
    "pass@1",
    "pass%1",
    "correct!",
    "../up",
    "/root",
    "a//b",
    "a/",
    ".",
    "..",
    "",
    " \n",
    "env/\u2713",
    "x" * 251,
    "a/./b",
    "..a",
]


@pytest.mark.parametrize("name", NAMES)
def test_every_name_becomes_one_that_mlflow_accepts(name):
    client = MlflowClient(tracking_uri())
    run_id = client.create_run(client.create_experiment("names")).info.run_id
    Points(client, run_id).send([{"step": 1, name: 0.5, "reward/mean": 0.25}])
    assert client.get_run(run_id).data.metrics == {accepted_name(name): 0.5, "reward/mean": 0.25}


def test_mapped_names_stay_distinct_and_valid_names_are_unchanged():
    assert len({accepted_name(name) for name in NAMES}) == len(NAMES)
    for name in ("reward/mean", "clip/fraction:0.1 to 0.2", "a-b_c.d", "x" * 250):
        assert accepted_name(name) == name
    assert accepted_name("env/pass@1") == "env/pass_1-32c5e96e"  # a resumed run must continue the same curve
