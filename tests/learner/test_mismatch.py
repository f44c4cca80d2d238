"""Sampler mismatch: weights worked by hand, their effect on the gradient, and which responses are dropped."""

import dataclasses
import math

import pytest
import torch

from rlzoo import UserError, load_zoo
from rlzoo.config.run_config import RunConfig
from rlzoo.training.mismatch import log_mismatch, mismatch_metrics
from tests.estimates import correction, weigh
from tests.learner.test_learner import make_learner, relative_error
from tests.off_policy import make_model, off_policy_batch

# two responses of 4 and 1 tokens; the padding has values that must not be read
LOG_RATIO = torch.tensor([[0.5, -0.1, 0.0, 0.2], [-0.9, 7.0, 7.0, 7.0]])
MASK = torch.tensor([[True, True, True, True], [True, False, False, False]])


def weights(name, **settings):
    return weigh(correction(name, **settings), LOG_RATIO, MASK)


def test_the_correction_is_none_by_default():
    assert RunConfig.compose(clip="fspo").correction is None
    assert RunConfig.compose(clip="fspo", overrides=["correction=none"]).correction is None


def test_truncation_caps_the_ratio_of_each_token():
    # exp(.5) = 1.6487 is above 1.3; exp(-.1) = .9048, 1, exp(.2) = 1.2214, exp(-.9) = .4066
    expected = torch.tensor([[1.3, 0.9048, 1.0, 1.2214], [0.4066, 1.0, 1.0, 1.0]])
    torch.testing.assert_close(weights("tis", high=1.3), expected, atol=1e-4, rtol=0)


def test_masking_drops_above_and_icepop_on_both_sides():
    mis = torch.tensor([[0.0, 0.9048, 1.0, 1.2214], [0.4066, 1.0, 1.0, 1.0]])
    torch.testing.assert_close(weights("mis", high=1.3), mis, atol=1e-4, rtol=0)
    icepop = torch.tensor([[0.0, 0.9048, 1.0, 1.2214], [0.0, 1.0, 1.0, 1.0]])
    torch.testing.assert_close(weights("icepop", low=0.5, high=1.3), icepop, atol=1e-4, rtol=0)


def test_pooling_distinguishes_the_sum_and_the_mean_of_a_response():
    # sums .6 and -.9; means .15 and -.9
    total = torch.tensor([[math.exp(0.6)], [math.exp(-0.9)]])
    torch.testing.assert_close(weights("tis", pool="sum", high=9.0), total)
    mean = torch.tensor([[math.exp(0.15)], [math.exp(-0.9)]])
    torch.testing.assert_close(weights("tis", pool="mean", high=9.0), mean)


def test_the_length_fair_band_grows_with_the_root_of_the_length():
    # edges width * 2 and width * 1 against |.6| and |-.9|
    assert weights("length_fair", width=0.31).tolist() == [[1.0], [0.0]]
    assert weights("length_fair", width=0.29).tolist() == [[0.0], [0.0]]
    assert weights("length_fair", width=0.91).tolist() == [[1.0], [1.0]]


def kept_by_length(settings, lengths=(50, 500, 5000), rows=2000, sigma=0.01):
    """Return the share of responses kept, for token log-ratios that are independent and normal."""
    rng = torch.Generator().manual_seed(0)
    shares = []
    for length in lengths:
        log_ratio = sigma * torch.randn(rows, length, generator=rng)
        kept = weigh(settings, log_ratio, torch.ones(rows, length, dtype=torch.bool)) > 0
        shares.append(float(kept.float().mean()))
    return shares


def test_the_length_fair_mask_drops_every_length_alike_where_masking_the_sum_drops_the_long():
    fair = kept_by_length(correction("length_fair", width=0.0196))
    # +-1.96 sigma sqrt(L) contains 95%; the standard error of a share of 2,000 is .005
    assert fair == pytest.approx([0.95, 0.95, 0.95], abs=0.02)
    field = kept_by_length(correction("icepop", pool="sum", low=0.5, high=2.0))
    # ln 2 = .693 is 9.8, 3.1 and .98 standard deviations of the sum: 1, .998 and .67 are kept
    assert field == pytest.approx([1.0, 0.998, 0.673], abs=0.02)


@pytest.fixture(scope="module")
def model():
    return make_model()


def mismatched(model, policy, seed=4):
    batch = off_policy_batch(model, policy)
    noise = 0.3 * torch.randn(batch.response_mask.shape, generator=torch.Generator().manual_seed(seed))
    sampled = torch.where(batch.response_mask, batch.old_log_probs - noise, 0.0)
    return dataclasses.replace(batch, rollout_log_probs=sampled)


def weighed(batch, settings):
    return dataclasses.replace(batch, correction_weights=weigh(settings, log_mismatch(batch), batch.response_mask))


@pytest.mark.parametrize(("name", "pool"), [("grpo", "token"), ("grpo", "sum"), ("fspo", "sum"), ("gspo", "mean")])
def test_weights_multiply_what_each_response_or_token_adds_to_the_gradient(model, name, pool):
    policy = load_zoo()[name]()
    plain = mismatched(model, policy)
    corrected = weighed(plain, correction("tis", pool=pool, high=1.1))
    learner = make_learner(model, policy)
    learner.accumulate(corrected, torch.arange(len(plain)))
    gradient = torch.cat([parameter.grad.flatten() for parameter in learner.model.parameters()])
    # without the correction, g of each response alone; then times its weights, token by token
    expected = torch.zeros_like(gradient)
    factors = torch.minimum(
        {
            "token": log_mismatch(plain).exp(),
            "sum": log_mismatch(plain).sum(-1, keepdim=True).exp(),
            "mean": (log_mismatch(plain).sum(-1, keepdim=True) / plain.lengths[:, None]).exp(),
        }[pool],
        torch.tensor(1.1),
    )
    # every rule's objective is linear in the advantage for weights above 0
    weighted = dataclasses.replace(plain, advantages=plain.advantages * factors)
    if pool != "token" or policy.scope == "token":
        other = make_learner(model, policy)
        other.accumulate(weighted, torch.arange(len(plain)))
        expected = torch.cat([parameter.grad.flatten() for parameter in other.model.parameters()])
    assert relative_error(gradient, expected) < 1e-5
    assert float((factors < 1.1).float().mean()) > 0.2
    uncorrected = make_learner(model, policy)
    uncorrected.accumulate(plain, torch.arange(len(plain)))
    without = torch.cat([parameter.grad.flatten() for parameter in uncorrected.model.parameters()])
    assert relative_error(without, expected) > 1e-2


def test_metrics_report_the_kept_fraction_by_length(model):
    policy = load_zoo()["fspo"]()
    batch = weighed(mismatched(model, policy), correction("length_fair", width=0.3))
    metrics = mismatch_metrics(batch)
    total = log_mismatch(batch).sum(-1)
    kept = total.abs() <= 0.3 * batch.lengths.sqrt()
    assert metrics["mismatch/kept"] == pytest.approx(float(kept.float().mean()))
    assert 0.3 < metrics["mismatch/kept"] < 1
    bins = [value for name, value in metrics.items() if name.startswith("mismatch/kept_length_bin_")]
    assert len(bins) >= 5
    assert metrics["mismatch/sum_abs_mean"] == pytest.approx(float(total.abs().mean()), rel=1e-5)


def test_a_rule_of_whole_responses_refuses_a_weight_per_token():
    with pytest.raises(UserError, match=r"correction='tis' gives one weight per token with these settings, but fspo has one"):
        RunConfig.compose(clip="fspo", overrides=["correction=tis"])
    assert RunConfig.compose(clip="grpo", overrides=["correction=tis"]).correction == correction("tis", pool="token")
    RunConfig.compose(clip="fspo", overrides=["correction=length_fair"])
    mean = RunConfig.compose(clip="fspo", overrides=["correction=tis", "correction.pool=mean", "correction.high=1.5"])
    assert mean.correction == correction("tis", pool="mean", high=1.5)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["correction=tiss"], r"unknown correction 'tiss'; did you mean 'tis'\?"),
        (
            ["correction=tis", "correction.pol=sum"],
            r"unknown key 'correction.pol'; did you mean 'correction.pool'\?",
        ),
        (["correction.pool=sum"], r"correction=\{'pool': 'sum'\}: expected the name of a correction, or a mapping with a name"),
        (["correction=tis", "correction.high=-1"], r"correction.high=-1: input should be greater than 0"),
    ],
)
def test_an_invalid_correction_is_refused(overrides, line):
    with pytest.raises(UserError, match=line):
        RunConfig.compose(clip="grpo", overrides=overrides)
