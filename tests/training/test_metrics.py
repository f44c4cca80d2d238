"""Metrics are the same for every policy, count responses with a signal, and do not depend on the micro-batches."""

import math

import pytest
import torch
from rlzoo_fspo import FSPO
from rlzoo_grpo import GRPO

from rlzoo import ClipInputs
from rlzoo.core.reductions import StepCounts
from rlzoo.measure.response_table import ResponseTable
from rlzoo.rollout.types import Rollout, RolloutGroup
from rlzoo.tasks.problem import Problem
from rlzoo.training.metrics import clip_metrics, rollout_metrics
from tests.measured import table_of

# four tokens each: FSPO's band is +-0.06, its ceiling 0.18
LOG_RATIOS = [0.02, 0.02, -0.02, 0.05, 0.0, 0.02]  # S = .08, .08, -.08, .2, 0, .08
ADVANTAGES = [1.0, -1.0, -1.0, -1.0, 1.0, 0.0]  # clipped above, free, clipped below, above the ceiling, free, no signal


def measured(policy, inputs, entropy=None, counts=None, groups=None):
    group = torch.arange(len(inputs.log_probs)) // 2 if groups is None else torch.tensor(groups)
    return table_of(policy, inputs, counts=counts, group=group, entropy=entropy)


def table(policy, log_ratios=LOG_RATIOS, advantages=ADVANTAGES, entropy=0.5, **more):
    old = torch.full((len(log_ratios), 4), -1.0)
    mask = torch.ones_like(old, dtype=torch.bool)
    inputs = ClipInputs(old + torch.tensor(log_ratios)[:, None], old, torch.tensor(advantages)[:, None], mask)
    return measured(policy, inputs, torch.full_like(old, entropy), **more)


def test_clips_are_counted_by_side_over_responses_with_a_signal():
    metrics = clip_metrics(table(FSPO()), with_kl=False)
    assert metrics["clip/fraction"] == pytest.approx(3 / 5)
    assert metrics["clip/fraction_high"] == pytest.approx(1 / 5)
    assert metrics["clip/fraction_low"] == pytest.approx(1 / 5)
    assert metrics["clip/fraction_dual"] == pytest.approx(1 / 5)
    assert metrics["learner/entropy"] == pytest.approx(0.5)


def test_ratio_metrics_are_over_all_tokens():
    metrics = clip_metrics(table(FSPO()), with_kl=False)
    mean = sum(LOG_RATIOS) / 6
    assert metrics["ratio/mu_token"] == pytest.approx(mean, rel=1e-4)
    spread = math.sqrt(sum(value**2 for value in LOG_RATIOS) / 6 - mean**2)
    assert metrics["ratio/sigma_token"] == pytest.approx(spread, rel=1e-3)
    assert metrics["ratio/log_ratio_max"] == pytest.approx(0.05, rel=1e-4)
    assert metrics["ratio/log_ratio_min"] == pytest.approx(-0.02, rel=1e-4)


def test_effective_weights_are_zero_for_clipped_tokens():
    # weights exp(.08) and exp(0) flow, three are cut: (1.08329 + 1)^2 / (5 (1.17351 + 1))
    assert clip_metrics(table(FSPO()), with_kl=False)["fairness/ess"] == pytest.approx(0.39934, rel=1e-3)


def test_a_token_rule_counts_a_response_by_its_share_of_clipped_tokens():
    old = torch.full((1, 4), -1.0)
    log_probs = old + torch.tensor([[0.5, 0.0, 0.0, 0.0]])
    inputs = ClipInputs(log_probs, old, torch.tensor([[1.0]]), torch.ones(1, 4, dtype=torch.bool))
    row = measured(GRPO(), inputs)
    assert row.clipped.tolist() == [0.25]
    assert row.clipped_high.tolist() == [0.25]


def test_a_response_with_advantages_by_token_counts_if_any_token_has_one():
    # tokens +1 -1 +0 cancel to 0 but carry a signal; the second response carries none; padding is not read
    old = torch.full((3, 4), -1.0)
    mask = torch.tensor([[True, True, True, False], [True, True, False, False], [True, True, True, True]])
    advantages = torch.tensor([[1.0, -1.0, 0.0, 5.0], [0.0, 0.0, 5.0, 5.0], [-2.0, 0.0, 0.0, 0.5]])
    inputs = ClipInputs(old + torch.tensor([0.5, -0.5, 0.0, 0.5]), old, advantages, mask)
    rows = measured(GRPO(), inputs)
    assert rows.advantage.tolist() == [0.0, 0.0, -1.5]
    assert rows.signal.tolist() == [1.0, 0.0, 1.0]
    # exp(.5) > 1.2 is cut for A > 0, exp(-.5) < .8 for A < 0: two tokens of the first response, the last of the third
    assert rows.clipped.tolist() == pytest.approx([2 / 3, 0.0, 1 / 4])
    assert rows.clipped_high.tolist() == pytest.approx([1 / 3, 0.0, 1 / 4])
    assert clip_metrics(rows, with_kl=False)["clip/fraction"] == pytest.approx((2 / 3 + 1 / 4) / 2)
    assert rows.clip_stats(torch.tensor([1.0, 9.0])).num_responses.tolist() == [[2, 0]]  # summed: 0 and -1.5


def test_rows_beyond_the_exponent_limit_are_counted_separately():
    metrics = clip_metrics(table(FSPO(width_ceiling=None), [6.0], [-1.0]), with_kl=False)  # S = 24 > 20, no ceiling
    assert (metrics["clip/fraction"], metrics["clip/fraction_limited"]) == (0.0, 1.0)


def test_bins_and_lre_are_logged():
    metrics = clip_metrics(table(FSPO()), with_kl=False)
    assert metrics["clip/fraction_length_bin_0"] == pytest.approx(3 / 5)
    assert metrics["clip/length_bin_5_edge"] == 4
    assert metrics["fairness/lre_max"] == pytest.approx(0.0, abs=1e-9)
    assert "fairness/lre_max" not in clip_metrics(table(FSPO(), [0.1], [1.0]), with_kl=False)  # all clipped


def test_clip_stats_are_sums_by_bin_and_sign():
    stats = table(FSPO()).clip_stats(torch.tensor([1.0, 4.0, 9.0]))
    assert stats.num_responses.tolist() == [[3, 2], [0, 0]]
    assert stats.num_clipped.tolist() == [[2, 1], [0, 0]]
    assert stats.log_ratio[0].tolist() == pytest.approx([0.08 - 0.08 + 0.2, 0.08], abs=1e-6)
    assert stats.length.tolist() == [[12, 8], [0, 0]]


def test_concatenated_tables_give_the_metrics_of_the_whole():
    counts = StepCounts(num_responses=6, num_tokens=24)
    first = table(FSPO(), LOG_RATIOS[:2], ADVANTAGES[:2], counts=counts, groups=[0, 0])
    second = table(FSPO(), LOG_RATIOS[2:], ADVANTAGES[2:], counts=counts, groups=[1, 1, 2, 2])
    whole = clip_metrics(table(FSPO()), with_kl=False)
    assert clip_metrics(ResponseTable.concat([first, second]), with_kl=False) == pytest.approx(whole, rel=1e-5)


def test_rollout_metrics():
    def rollout(reward, length, finished=True):
        return Rollout((1,), (2,) * length, (0.0,) * length, "", finished, 0, reward)

    groups = [
        RolloutGroup(Problem("a", "1"), (rollout(1.0, 2), rollout(0.0, 4, finished=False))),
        RolloutGroup(Problem("b", "2"), (rollout(1.0, 6), rollout(1.0, 8))),
    ]
    metrics = rollout_metrics(groups)
    assert metrics["reward/mean"] == 0.75
    assert metrics["reward/std"] == pytest.approx(math.sqrt(3) / 4)  # of 1 0 1 1: variance 3/16
    assert metrics["reward/zero_std_groups"] == 0.5
    assert metrics["response/length_mean"] == 5.0
    assert metrics["response/truncated"] == 0.25
