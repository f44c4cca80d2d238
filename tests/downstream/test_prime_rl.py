"""Tests rlzoo's loss for prime-rl, with prime-rl's own `compute_loss` if a checkout is available.

prime-rl is not on the package index. ``RLZOO_PRIME_RL=CHECKOUT`` names a checkout, whose modules are then imported; tested at
559b44772e471d1538537b8805cc77f3824a5e64 of 2026-08-21 (version 0.8.0). Without it, the inputs are a dataclass with the fields
of ``prime_rl.trainer.rl.loss.LossInputs`` at that commit.
"""

import importlib
import inspect
import os
import sys
import tomllib
import warnings
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import torch

from examples import prime_rl_loss as prime_rl
from rlzoo import load_zoo
from rlzoo.core.errors import UserError
from tests.downstream.shared import (
    assert_same_gradient,
    flat_gradient,
    fresh,
    learner_gradient,
    page_block,
    row_log_probs,
    supported,
)
from tests.off_policy import make_model, off_policy_batch

CHECKOUT = os.environ.get("RLZOO_PRIME_RL")
ZOO = load_zoo()
TAKEN = [name for name in supported(ZOO, ["turn_ids", "ref_log_probs"]) if ZOO[name].scope != "batch"]
needs_checkout = pytest.mark.skipif(CHECKOUT is None, reason="RLZOO_PRIME_RL names no checkout of prime-rl")


def real():
    """prime-rl's own loss module."""
    for folder in ("src", "packages/prime-rl-configs/src"):
        if (path := str(Path(CHECKOUT) / folder)) not in sys.path:
            sys.path.append(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from its libraries, on import
        return importlib.import_module("prime_rl.trainer.rl.loss")


@dataclass
class Inputs:
    """The fields of prime-rl's LossInputs."""

    trainer_logprobs: torch.Tensor
    inference_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    loss_weights: torch.Tensor | None = None


def sample(**replaced):
    """Return a sample of two prompt tokens and five response tokens, the third of which is from an environment."""
    values = {
        "trainer_logprobs": torch.tensor([-4.0, -4.0, -0.5, -1.0, -9.0, -0.2, -0.3], requires_grad=True),
        "inference_logprobs": torch.tensor([-4.0, -4.0, -0.6, -1.0, -3.0, -0.5, -0.3]),
        "ref_logprobs": None,
        "advantages": torch.full((7,), 2.0),
        "loss_mask": torch.tensor([False, False, True, True, False, True, True]),
    }
    return Inputs(**{**values, **replaced})


def test_a_rule_per_token_sums_its_objective_over_the_tokens():
    # ratios e^0.1, 1, e^0.3, 1 with advantage 2; the third is clipped at 1.2 and has no gradient
    inputs = sample()
    loss, metrics = prime_rl.loss(inputs, "grpo", clip_low=0.2, clip_high=0.2)
    ratio = torch.tensor(0.1).exp().item()
    assert loss.item() == pytest.approx(-2 * (ratio + 1 + 1.2 + 1), rel=1e-6)
    loss.backward()
    expected = [0, 0, -2 * ratio, -2, 0, 0, -2]
    assert inputs.trainer_logprobs.grad.tolist() == pytest.approx(expected, rel=1e-6)
    assert {name: value.item() for name, value in metrics.items()} == {
        "clip/fraction": 0.25,
        "clip/fraction_length_bin_0": 0.25,
    }


def test_a_rule_per_response_has_one_objective_a_sample():
    inputs = sample()
    loss, metrics = prime_rl.loss(inputs, "rloo/clip_low:0.5/clip_high:0.6")
    ratio = torch.tensor(0.4).exp().item()  # 1.49, within 1.6
    assert loss.item() == pytest.approx(-2 * ratio, rel=1e-6)
    loss.backward()
    assert inputs.trainer_logprobs.grad.tolist() == pytest.approx([0, 0, *2 * [-2 * ratio], 0, *2 * [-2 * ratio]], rel=1e-6)
    assert metrics["clip/fraction"].item() == 0


def test_weights_multiply_the_objective():
    weights = torch.tensor([0.0, 0, 1, 0.5, 0, 2, 1])
    plain, weighted = sample(), sample(loss_weights=weights)
    for inputs in (plain, weighted):
        prime_rl.loss(inputs, "gpg").loss.backward()
    assert torch.equal(weighted.trainer_logprobs.grad, plain.trainer_logprobs.grad * weights)
    with pytest.raises(UserError, match="weights for fspo differ between the tokens"):
        prime_rl.loss(sample(loss_weights=weights), "fspo")
    half, whole = sample(loss_weights=torch.full((7,), 0.5)), sample()
    assert prime_rl.loss(half, "fspo").loss.item() == pytest.approx(prime_rl.loss(whole, "fspo").loss.item() / 2)


def test_a_sample_without_tokens_has_a_differentiable_loss():
    for rule in ("grpo", "fspo"):
        inputs = sample(loss_mask=torch.zeros(7, dtype=torch.bool))
        loss, metrics = prime_rl.loss(inputs, rule)
        loss.backward()
        assert loss.item() == 0
        assert not inputs.trainer_logprobs.grad.any()
        assert metrics == {}


@pytest.mark.parametrize(
    ("rule", "settings", "message"),
    [("m2po", {}, "rlzoo:m2po needs a whole step, but prime-rl passes one sample at a time to a loss"),
     ("fspo-adaptive", {}, "fspo-adaptive adapts its band"), ("gvpo", {}, "gvpo needs group_ids, rewards"),
     ("grpo", {"reduction": "token_mean"}, "would be ignored; set no reduction, because prime-rl divides"),
     ("grpo", {"width": 1}, "unknown key 'grpo/width'"), ("grop", {}, "did you mean 'grpo'")],
)  # fmt: skip
def test_settings_that_would_be_wrong_or_ignored_are_rejected(rule, settings, message):
    with pytest.raises(UserError, match=message):
        prime_rl.loss(sample(), rule, **settings)


def samples(model, batch):
    """Return the rows of a batch in prime-rl's format: one log-prob per token of a sequence; the first is a constant."""
    rows = []
    for row, sequence in enumerate(batch.sequences):
        prompt, size = int(batch.prompt_lengths[row]), len(sequence)

        def whole(values, prompt=prompt, size=size):
            return torch.cat([torch.zeros(prompt), values[: size - prompt].float()])

        rows.append(Inputs(
            trainer_logprobs=torch.cat([torch.full((1,), -4.6), row_log_probs(model, sequence)]),
            inference_logprobs=whole(batch.old_log_probs[row]),
            ref_logprobs=None,
            advantages=batch.advantages[row].expand(size),
            loss_mask=whole(batch.response_mask[row]).bool(),
        ))  # fmt: skip
    return rows


def step_loss(name, policy, rows, num_tokens):
    settings = policy.model_dump(exclude_defaults=True, exclude={"reduction"})
    return sum(prime_rl.loss(inputs, name, **settings).loss for inputs in rows) / num_tokens


def for_prime_rl(name):
    """Return a rule with the reduction that prime-rl uses, and the remaining factor."""
    rule = ZOO[name]
    policy = rule() if rule.scope == "sequence" else rule(reduction="token_mean")
    return policy.scaled(0.1) if policy.ratio_to_sampler else policy


@pytest.mark.long
@pytest.mark.parametrize("name", TAKEN)
def test_the_gradient_equals_that_of_the_rlzoo_learner(name):
    model, policy = make_model(), for_prime_rl(name)
    batch = off_policy_batch(model, policy)
    num_tokens = int(batch.response_mask.sum())
    factor = 1.0 if policy.reduction == "token_mean" else len(batch) / num_tokens
    trained = fresh(model)
    step_loss(name, policy, samples(trained, batch), num_tokens).backward()
    assert_same_gradient(flat_gradient(trained), factor * learner_gradient(model, policy, batch))


@needs_checkout
def test_the_inputs_have_the_fields_of_prime_rls():
    assert [field.name for field in fields(real().LossInputs)] == [field.name for field in fields(Inputs)]
    assert {field.name for field in fields(real().LossOutputs)} == set(prime_rl.LossOutputs._fields)
    assert next(iter(inspect.signature(prime_rl.loss).parameters)) == "inputs"


@needs_checkout
@pytest.mark.parametrize("name", TAKEN)
def test_the_gradient_through_prime_rl_equals_that_of_the_rlzoo_learner(name):
    real()
    from prime_rl.configs.trainer import CustomLossConfig

    model, policy = make_model(), for_prime_rl(name)
    batch = off_policy_batch(model, policy)
    num_tokens = int(batch.response_mask.sum())
    settings = policy.model_dump(exclude_defaults=True, exclude={"reduction"})
    config = CustomLossConfig(import_path="examples.prime_rl_loss.loss", kwargs={"rule": name, **settings})
    trained = fresh(model)
    rows = samples(trained, batch)
    loss, metrics = real().compute_loss(
        [row.trainer_logprobs for row in rows], [row.inference_logprobs for row in rows], None,
        [row.advantages for row in rows], [row.loss_mask for row in rows], None, None, None,
        rl_loss_fn=real().setup_rl_loss_fn(config), rl_scale=num_tokens, ce_scale=1, ref_kl_scale=1,
    )  # fmt: skip
    loss.backward()
    factor = 1.0 if policy.reduction == "token_mean" else len(batch) / num_tokens
    assert_same_gradient(flat_gradient(trained), factor * learner_gradient(model, policy, batch))
    assert len(metrics["clip/fraction"]) == 15  # the advantages of three of 18 samples are 0


def test_the_settings_on_the_page_create_a_rule(monkeypatch):
    monkeypatch.syspath_prepend(Path(prime_rl.__file__).parent)
    settings = tomllib.loads(page_block("prime-rl.md", "toml"))["trainer"]["loss"]
    module, _, name = settings["import_path"].rpartition(".")
    loss = getattr(importlib.import_module(module), name)
    assert loss(sample(), **settings["kwargs"]).loss.isfinite()
    if CHECKOUT is not None:
        real()
        from prime_rl.configs.trainer import CustomLossConfig

        assert CustomLossConfig(**settings).kwargs == settings["kwargs"]


@needs_checkout
def test_dppo_with_prime_rls_settings_has_the_gradient_of_its_default_loss():
    real()
    from prime_rl.configs.trainer import DefaultLossConfig

    model = make_model()
    batch = off_policy_batch(model, ZOO["grpo"]())
    gradients = []
    theirs = real().setup_rl_loss_fn(DefaultLossConfig(dppo_mask_low=0.01, dppo_mask_high=0.01, kl_tau=0.0))
    for loss in (theirs, lambda inputs: prime_rl.loss(inputs, "dppo-tv", delta_low=0.01, delta_high=0.01, ratio_cap=None)):
        trained = fresh(model)
        sum(loss(inputs).loss for inputs in samples(trained, batch)).backward()
        gradients.append(flat_gradient(trained))
    assert_same_gradient(*gradients)


def test_two_optimizer_steps():
    model = fresh(make_model())
    batch = off_policy_batch(model, ZOO["fspo"]())
    num_tokens = int(batch.response_mask.sum())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(step_loss("fspo", ZOO["fspo"](), samples(model, batch), num_tokens))
        losses[-1].backward()
        optimizer.step()
    assert losses[1] < losses[0]
