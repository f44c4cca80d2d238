"""What reaches the gradient, by length, compared with numbers worked by hand and with brute force."""

import math

import pytest
import torch
from rlzoo_cispo import CISPO
from rlzoo_fspo import FSPO
from rlzoo_grpo import GRPO
from rlzoo_gspo import GSPO
from rlzoo_opmd import OPMD

from rlzoo import ClipInputs, load_zoo
from rlzoo.journal.tracking.rows import curves
from rlzoo.measure.profile import LengthProfile
from rlzoo.measure.response_table import ResponseTable, group_keys, pooled_runs
from rlzoo.testing.data import filled
from tests.measured import table_of
from tests.rules import by_inputs


def rows(policy, log_ratios, advantages, lengths=None, groups=None):
    """Return a table of responses whose tokens all have the same log-ratio."""
    lengths = torch.tensor(lengths or [4] * len(log_ratios))
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    old = torch.where(mask, -1.0, 0.0)
    log_probs = torch.where(mask, old + torch.tensor(log_ratios)[:, None], 0.0)
    inputs = ClipInputs(log_probs, old, torch.tensor(advantages)[:, None], mask)
    return table_of(policy, inputs, group=None if groups is None else torch.tensor(groups))


def test_a_weight_is_the_ratio_that_reaches_the_gradient():
    # FSPO's band is +-.06 on S = 4 log_ratio: free, clipped above, clipped below, free the other way
    table = rows(FSPO(), [0.01, 0.02, -0.02, -0.02], [1.0, 1.0, -1.0, 1.0])
    assert table.weight.tolist() == pytest.approx([math.exp(0.04), 0.0, 0.0, math.exp(-0.08)], rel=1e-5)
    # GRPO: each token's ratio
    assert rows(GRPO(), [0.1, 0.3], [1.0, 1.0]).weight.tolist() == pytest.approx([math.exp(0.1), 0.0], rel=1e-5)
    # GSPO: the ratio's geometric mean, regardless of the length
    assert rows(GSPO(), [2e-4], [1.0]).weight.tolist() == pytest.approx([math.exp(2e-4)], rel=1e-6)


def test_a_rule_that_caps_or_reverses_the_gradient_has_the_matching_weight():
    # CISPO's ceiling is 5: a ratio of exp(2) = 7.39 keeps the weight 5, although it counts as clipped
    capped = rows(CISPO(), [2.0], [1.0])
    assert (capped.clipped.tolist(), capped.weight.tolist()) == ([1.0], pytest.approx([5.0], rel=1e-5))
    # OPMD: J = A S - tau/2 S^2, slope A - tau S: with A = 1, tau = .1, S = 20 it is -1 of what it is at S = 0
    assert rows(OPMD(), [5.0], [1.0]).weight.tolist() == pytest.approx([-1.0], rel=1e-5)


def test_effective_sample_size_follows_the_weights():
    profile = LengthProfile.of(rows(CISPO(), [2.0, 0.0], [1.0, 1.0]))
    assert profile.ess == pytest.approx((5 + 1) ** 2 / (2 * (25 + 1)), rel=1e-5)


def test_gradient_mass_is_shared_by_length():
    # GRPO's mean over a response's tokens gives all responses the same mass; with the sum over tokens it grows with the length
    lengths = [2, 4, 6, 8, 10, 12]
    even = LengthProfile.of(rows(GRPO(), [0.0] * 6, [1.0] * 6, lengths))
    assert even.gradient_mass == pytest.approx([1 / 6] * 6)
    by_length = LengthProfile.of(rows(FSPO(), [0.0] * 6, [-1.0] * 6, lengths))
    assert by_length.gradient_mass == pytest.approx([length / 42 for length in lengths])


@pytest.mark.parametrize("name", by_inputs())
def test_gradient_mass_and_weight_are_those_of_finite_differences(name):
    """Both come from J alone, by shifting every token's log-prob in turn, in float64."""
    rng = torch.Generator().manual_seed(3)
    size, length = 5, 4
    mask = torch.ones(size, length, dtype=torch.bool)
    old = -torch.rand(size, length, generator=rng).double()
    log_ratio = 0.05 * torch.randn(size, length, generator=rng).double()
    advantages = torch.randn(size, 1, generator=rng).double()
    policy = load_zoo()[name]()

    def objective(log_probs):
        inputs = filled(policy, ClipInputs(log_probs, old, advantages, mask, rollout_log_probs=old))
        return policy(inputs).objective.double().sum()

    inputs = filled(policy, ClipInputs(old + log_ratio, old, advantages, mask, rollout_log_probs=old))
    summed = policy.replace(reduction="sequence_mean_token_sum")
    table = table_of(summed, inputs, group=torch.zeros(size))
    step = 1e-3
    slopes = torch.zeros(2, size, length, dtype=torch.float64)
    for which, point in enumerate((old + log_ratio, old)):
        for row in range(size):
            for token in range(length):
                shift = torch.zeros_like(point)
                shift[row, token] = step
                slopes[which, row, token] = (objective(point + shift) - objective(point - shift)) / (2 * step) / size
    leaf = (old + log_ratio).requires_grad_()
    exact = torch.autograd.grad(objective(leaf), leaf)[0] / size
    if not torch.allclose(slopes[0], exact.double(), rtol=0.02, atol=1e-4):
        slopes[0] = exact  # a stop-gradient, or an edge of the band within the step: use autograd's slope
        leaf = old.clone().requires_grad_()
        slopes[1] = torch.autograd.grad(objective(leaf), leaf)[0] / size
    torch.testing.assert_close(table.gradient_mass.double(), slopes[0].abs().sum(-1), rtol=0.02, atol=1e-4)
    square = slopes[1].square().sum(-1)
    expected = torch.where(square > 0, (slopes[0] * slopes[1]).sum(-1) / square, 0.0)
    torch.testing.assert_close(table.weight.double(), expected, rtol=0.03, atol=1e-3)


def test_spread_and_drift_of_normal_log_ratios_are_found():
    # token log-ratios drawn from N(-.001, .02^2): sigma of S / sqrt(L) is .02 at every length
    rng = torch.Generator().manual_seed(0)
    number = 6000
    lengths = torch.randint(10, 200, (number,), generator=rng)
    mask = torch.arange(200) < lengths[:, None]
    token = torch.where(mask, -0.001 + 0.02 * torch.randn(mask.shape, generator=rng), 0.0)
    inputs = ClipInputs(token, torch.zeros_like(token), torch.ones(number, 1), mask)
    profile = LengthProfile.of(table_of(FSPO(), inputs, group=torch.arange(number) // 8))
    assert profile.sigma_root == pytest.approx([0.02] * 6, rel=0.06)
    # long responses have about 190 tokens: -.001 x 190 / (.02 x sqrt(190)) = -.69
    assert profile.drift == pytest.approx(-0.69, abs=0.05)


def test_spread_is_that_of_the_rows_that_moved():
    # S / sqrt(L) is +-.02 in the rows that moved; as many rows that did not move must not halve its variance
    moved, still = [0.01, -0.01] * 3, [0.0] * 6
    profile = LengthProfile.of(rows(FSPO(), moved + still, [1.0] * 12))
    assert profile.sigma_root[0] == pytest.approx(0.02, rel=1e-4)


def test_updates_without_movement_have_no_spread():
    profile = LengthProfile.of(rows(FSPO(), [0.0] * 6, [1.0] * 6))
    assert all(math.isnan(value) for value in (*profile.sigma_root, profile.drift))
    assert not any("sigma_root" in name or "drift" in name for name in profile.metrics())


def test_counts_are_separate_for_each_sign_and_sum_to_the_total():
    profile = LengthProfile.of(rows(FSPO(), [0.02, 0.02, -0.02, -0.02], [1.0, -1.0, 1.0, -1.0]))
    both, below, above = profile.both, profile.below, profile.above
    assert (sum(both.count), sum(below.count), sum(above.count)) == (4, 2, 2)
    assert (both.fraction[0], below.fraction[0], above.fraction[0]) == (0.5, 0.5, 0.5)
    assert below.low[0] < 0.5 < below.high[0]


def test_rows_without_an_advantage_have_no_profile():
    assert LengthProfile.of(rows(FSPO(), [0.1], [0.0])) is None


def test_prompt_ids_are_equal_across_epochs_and_differ_across_steps_and_runs():
    steps = [group_keys(step, torch.tensor([0, 0, 1, 1])) for step in (1, 1, 123_456_789)]
    whole = ResponseTable.concat([rows(FSPO(), [0.0] * 4, [1.0] * 4, groups=group.tolist()) for group in steps])
    assert len(whole.group.unique()) == 4
    assert torch.equal(whole.group[:4], whole.group[4:8])
    two_runs = pooled_runs([whole, whole]).group
    assert two_runs.unique().tolist() == list(range(8))
    assert torch.equal(two_runs[:4], two_runs[4:8])


def test_epochs_over_the_same_responses_narrow_no_interval_of_the_metrics():
    generator = torch.Generator().manual_seed(0)
    groups = torch.arange(30).repeat_interleave(8)
    drift = (3 * torch.randn(30, generator=generator)[groups] + torch.randn(240, generator=generator)) * 0.02
    advantages = torch.randn(240, generator=generator)
    lengths = torch.randint(2, 40, (240,), generator=generator)
    once = rows(FSPO(), drift.tolist(), advantages.tolist(), lengths.tolist(), groups.tolist())
    alone = rows(FSPO(), drift.tolist(), advantages.tolist(), lengths.tolist())  # as if each had its own prompt
    metrics, four, independent = (
        LengthProfile.of(table).metrics() for table in (once, ResponseTable.concat([once] * 4), alone)
    )

    def width(found, name):
        return found[f"{name}_high"] - found[f"{name}_low"]

    names = [name.removesuffix("_low") for name in metrics if name.endswith("_ci_low")]
    assert len(names) == 3 * 6 + 2
    for name in names:  # four times as many independent rows give an interval half as wide
        assert 0.8 < width(four, name) / width(metrics, name) < 1.01, name
    assert four["fairness/lre_noise"] == pytest.approx(metrics["fairness/lre_noise"], rel=1e-3)
    bins = [f"clip/fraction_length_bin_{k}_ci" for k in range(6)]
    assert sum(width(metrics, name) > width(independent, name) for name in bins) >= 5, "responses to one prompt are alike"


def test_intervals_of_individual_bins_are_not_sent_to_mlflow():
    metrics = LengthProfile.of(rows(FSPO(), [0.01] * 6, [1.0] * 6, [2, 4, 6, 8, 10, 12])).metrics()
    assert "clip/fraction_length_bin_0_ci_low" in metrics
    assert "clip/fraction_length_bin_0_ci_low" not in curves(metrics)
    assert {"fairness/lre_max_ci_low", "clip/fraction_negative_length_bin_0", "fairness/ess"} & set(metrics)


def test_a_bin_between_equal_quantiles_holds_no_length():
    # all have four tokens: every quantile is 4, so bin 0 has all of them and the others are empty
    profile = LengthProfile.of(rows(FSPO(), [0.0] * 6, [1.0] * 6))
    assert profile.bin_labels() == ["4-4", *["none"] * 5]
    assert profile.both.count == (6, 0, 0, 0, 0, 0)
