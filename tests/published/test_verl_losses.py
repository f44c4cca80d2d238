"""rlzoo's rules compared with the policy losses in the registry of verl 0.9.1: values and gradients on shared tensors."""

import dataclasses
import math

import pytest
import torch
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn
from verl.workers.config import ActorConfig, PolicyLossConfig

from rlzoo import ClipInputs, load_zoo
from rlzoo.core.reductions import StepCounts, reduce_objective
from tests.published.shared import MAX_LENGTH, assert_agree, clipped_share, ours, shared_inputs

MODES = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "sequence_mean_token_sum": "seq-mean-token-sum",
    "constant_length": "seq-mean-token-sum-norm",
}
NO_CEILING = 1e6  # for clip_ratio_c, which is 3 by default and cannot be turned off
GSPO = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}

# rule, its settings, verl's name, its settings
CASES = [
    ("grpo", {}, "vanilla", {"clip_ratio_c": NO_CEILING}),
    ("grpo", {"clip_low": 0.1, "clip_high": 0.28, "dual_clip": 1.5, "reduction": "token_mean"},
     "vanilla", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.28, "clip_ratio_c": 1.5}),
    ("grpo", {"dual_clip": 1.1, "reduction": "constant_length"}, "vanilla", {"clip_ratio_c": 1.1}),
    ("gspo", {}, "gspo", GSPO),
    ("gspo-token", {}, "gspo", GSPO),
    ("gspo-token", {"reduction": "token_mean"}, "gspo", GSPO),
    ("sapo", {}, "sapo", {}),
    ("sapo", {"tau_positive": 2.0, "tau_negative": 3.0}, "sapo", {"tau_pos": 2.0, "tau_neg": 3.0}),
    ("gpg", {}, "gpg", {}),
    ("cispo", {"clip_low": 0.2, "clip_high": 0.25}, "cispo", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.25}),
    ("cispo", {"clip_high": 0.25}, "cispo", {"clip_ratio_low": 1.0, "clip_ratio_high": 0.25}),
    ("gmpo", {}, "geo_mean", {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}),
    ("gmpo", {"width_low": 0.1, "width_high": 0.2}, "geo_mean", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2}),
    ("kl-cov", {"fraction": 0.2, "kl_coef": 0.5}, "kl_cov", {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.5}),
    ("kl-cov", {}, "kl_cov", {"kl_cov_ratio": 2e-3, "ppo_kl_coef": 1.0}),
    ("dro", {}, "dro", {"dro_beta": 0.05}),
    ("dro", {"beta": 2.0, "reduction": "sequence_mean"}, "dro", {"dro_beta": 2.0}),
    # a fraction of 1 drops every candidate, so the draw does not matter
    ("clip-cov", {"fraction": 1.0, "cov_low": 0.1, "cov_high": 2.0}, "clip_cov",
     {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 2.0}),
    ("dppo-tv", {}, "dppo_tv", {"clip_ratio_low": 0.15, "clip_ratio_high": 0.15, "clip_ratio_c": 20.0}),
    ("dppo-tv", {"delta_low": 0.05, "delta_high": 0.1, "ratio_cap": 1.1},
     "dppo_tv", {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1, "clip_ratio_c": 1.1}),
    ("dppo-kl", {}, "dppo_kl", {"clip_ratio_low": 0.05, "clip_ratio_high": 0.05, "clip_ratio_c": 20.0}),
    ("dppo-kl", {"delta_low": 0.01, "delta_high": 0.02, "ratio_cap": 1.1},
     "dppo_kl", {"clip_ratio_low": 0.01, "clip_ratio_high": 0.02, "clip_ratio_c": 1.1}),
]  # fmt: skip
NEVER_CUT = ("sapo", "gpg", "dro")


def rule(name, settings):
    return load_zoo()[name](**settings)


def config_of(settings, **global_batch_info):
    names = {field.name for field in dataclasses.fields(PolicyLossConfig)}
    policy_loss = PolicyLossConfig(**{name: value for name, value in settings.items() if name in names})
    actor = {name: value for name, value in settings.items() if name not in names}
    config = ActorConfig(strategy="fsdp", rollout_n=8, use_dynamic_bsz=True, policy_loss=policy_loss, **actor)
    config.global_batch_info.update({"loss_scale_factor": MAX_LENGTH, **global_batch_info})
    return config


def theirs(name, inputs, reduction, settings, **global_batch_info):
    """Return verl's loss and gradient, float64; verl takes advantages per token."""
    log_probs = inputs.log_probs.double().detach().clone().requires_grad_()
    advantages = inputs.advantages.double().expand(log_probs.shape).clone()
    config = config_of(settings, **global_batch_info)
    loss, _ = get_policy_loss_fn(name)(
        inputs.old_log_probs.double(), log_probs, advantages, inputs.response_mask, MODES[reduction], config
    )
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return loss.item(), gradient


def without_rollout(inputs):
    # verl's losses get one set of old log-probs; rules that prefer the sampler's use these instead
    return dataclasses.replace(inputs, rollout_log_probs=None)


@pytest.mark.parametrize(("name", "settings", "loss_mode", "config"), CASES, ids=str)
def test_loss_and_gradient_equal_verl(name, settings, loss_mode, config):
    policy = rule(name, settings)
    for seed in range(4):
        inputs = without_rollout(shared_inputs(policy, seed))
        if name == "clip-cov":  # see test_clip_cov_of_verl_also_draws_tokens_without_advantage
            inputs = dataclasses.replace(inputs, advantages=torch.where(inputs.advantages == 0, 0.3, inputs.advantages))
        if name not in NEVER_CUT:
            least = {"kl-cov": 0, "dppo-tv": 0.01, "dppo-kl": 0.01}.get(name, 0.1)
            assert least < clipped_share(policy, inputs) < 0.45
        assert_agree(theirs(loss_mode, inputs, policy.reduction, config), ours(policy, inputs))


@pytest.mark.parametrize("reduction", MODES)
def test_the_four_reductions_equal_agg_loss(reduction):
    inputs = shared_inputs(rule("grpo", {}))
    mask = inputs.response_mask.clone()
    mask[:3] = False  # responses without tokens count on neither side
    value = inputs.log_probs
    for info in ({}, {"dp_size": 2, "batch_num_tokens": 1000, "global_batch_size": 50}):
        counts = StepCounts(info.get("global_batch_size", 21), info.get("batch_num_tokens", int(mask.sum())))
        got = reduce_objective(value, mask, reduction, counts, MAX_LENGTH).item() * info.get("dp_size", 1)
        expected = agg_loss(value.double(), mask, MODES[reduction], loss_scale_factor=MAX_LENGTH, **info).item()
        assert got == pytest.approx(expected, rel=1e-6)


# Differences: each test states one, and checks that there is no other on its data.


def test_vanilla_has_a_dual_clip_of_3_by_default():
    # ratio 4, A = -1: verl cuts, GRPO and PPO do not
    one = torch.ones(1, 1)
    inputs = ClipInputs(-one + math.log(4), -one, -one, one.bool())
    assert theirs("vanilla", inputs, "sequence_mean", {})[1].item() == 0
    assert ours(rule("grpo", {}), inputs)[1].item() == pytest.approx(4)
    assert ours(rule("grpo", {"dual_clip": 3.0}), inputs)[1].item() == 0


@pytest.mark.parametrize(("name", "loss_mode"), [("dppo-tv", "dppo_tv"), ("dppo-kl", "dppo_kl")])
def test_the_configuration_of_verl_caps_the_weight_of_dppo_at_3(name, loss_mode):
    # a rare token from 0.001 to 0.004: within both trust regions, ratio 4; the default in the code of both is 20
    one = torch.ones(1, 1)
    inputs = ClipInputs(one * math.log(0.004), one * math.log(0.001), one, one.bool())
    reduction = "sequence_mean"
    for ratio_cap, config in ((3.0, {}), (20.0, {"clip_ratio_c": 20.0})):
        slope = -theirs(loss_mode, inputs, reduction, config)[1].item()
        assert slope == pytest.approx(min(4, ratio_cap))
        assert slope == pytest.approx(-ours(rule(name, {"reduction": reduction, "ratio_cap": ratio_cap}), inputs)[1].item())


def test_geo_mean_of_verl_counts_empty_responses_and_ignores_the_step():
    policy = rule("gmpo", {})
    inputs = shared_inputs(policy)
    mask = inputs.response_mask.clone()
    mask[:6] = False
    inputs = dataclasses.replace(inputs, response_mask=mask)
    settings = {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}
    loss, gradient = theirs("geo_mean", inputs, "sequence_mean", settings)
    assert_agree((loss * 24 / 18, gradient * 24 / 18), ours(policy, inputs))
    # 24 of the 240 responses of a step on 2 devices: the share is the same as without them; agg_loss would give a fifth
    info = {"dp_size": 2, "batch_num_tokens": 5000, "global_batch_size": 240}
    assert theirs("geo_mean", inputs, "sequence_mean", settings, **info)[0] == loss


def test_geo_mean_of_verl_has_no_limit():
    # log-ratio 1000, A = -1: infinite there, exp(20) here
    one = torch.ones(1, 1)
    inputs = ClipInputs(999 * one, -one, -one, one.bool())
    settings = {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}
    assert math.isinf(theirs("geo_mean", inputs, "sequence_mean", settings)[0])
    assert ours(rule("gmpo", {}), inputs)[0] == pytest.approx(math.exp(20))


def test_gspo_of_verl_stops_at_exp_10():
    # mean log-ratio 15, A = -1: verl's ratio is exp(10) and has no gradient, ours is exp(15)
    one = torch.ones(1, 1)
    inputs = ClipInputs(14 * one, -one, -one, one.bool())
    loss, gradient = theirs("gspo", inputs, "sequence_mean", GSPO)
    assert loss == pytest.approx(math.exp(10))
    assert gradient.item() == 0
    assert ours(rule("gspo", {}), inputs)[0] == pytest.approx(math.exp(15), rel=1e-5)


def test_sapo_and_geo_mean_of_verl_ignore_loss_agg_mode():
    inputs = shared_inputs(rule("sapo", {}))
    for name in ("sapo", "geo_mean"):
        losses = {theirs(name, inputs, reduction, {})[0] for reduction in MODES}
        assert len(losses) == 1


def test_clip_cov_of_verl_also_draws_tokens_without_advantage():
    # mean A = 1 over these tokens; the tokens of the second response have A = 0 and cov = (0 - 1)(log pi - mean)
    log_probs = torch.tensor([[-2.0, -2.0], [-4.0, -4.0]])
    inputs = ClipInputs(log_probs, log_probs, torch.tensor([[2.0], [0.0]]), torch.ones(2, 2, dtype=torch.bool))
    config = {"clip_cov_ratio": 0.25, "clip_cov_lb": 0.5, "clip_cov_ub": 2.0}  # cov is 1 everywhere, and one of four is dropped
    policy = rule("clip-cov", {"fraction": 0.25, "cov_low": 0.5, "cov_high": 2.0})
    torch.manual_seed(0)
    dropped = [int((theirs("clip_cov", inputs, "token_mean", config)[1] == 0).sum()) for _ in range(20)]
    assert set(dropped) == {2, 3}  # two have no gradient anyway; in some draws no other token loses its gradient
    for seed in range(20):
        assert int((ours(policy, dataclasses.replace(inputs, seed=seed))[1] == 0).sum()) == 3


def test_clip_cov_draws_as_many_as_verl():
    policy = rule("clip-cov", {"fraction": 0.02, "cov_low": 0.1, "cov_high": 2.0})
    inputs = shared_inputs(policy)
    inputs = dataclasses.replace(inputs, advantages=torch.where(inputs.advantages == 0, 0.3, inputs.advantages))
    mask = inputs.response_mask
    config = {"clip_cov_ratio": 0.02, "clip_cov_lb": 0.1, "clip_cov_ub": 2.0}
    their_zeros = (theirs("clip_cov", inputs, "token_mean", config)[1][mask] == 0).sum()
    assert their_zeros == (ours(policy, inputs)[1][mask] == 0).sum()
    plain = ours(rule("grpo", {"reduction": "token_mean"}), inputs)[1]
    assert their_zeros > (plain[mask] == 0).sum()
