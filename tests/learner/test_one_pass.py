"""A rule is evaluated once on every trained row, regardless of its scope."""

import dataclasses
import traceback
from collections import Counter
from typing import ClassVar

import pytest
import torch
from rlzoo_covariance import ClipCov
from rlzoo_fspo import FSPO
from rlzoo_fspo_adaptive import FSPOAdaptive
from rlzoo_grpo import GRPO
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlzoo import ClipInputs
from tests.learner.test_learner import make_learner
from tests.measured import table_of
from tests.off_policy import make_model, off_policy_batch, scored


def counting(kind):
    """Return the rule, and a count of the rows on which it is evaluated: of the batch, and of synthetic rows at ratio 1."""

    class Counting(kind):
        rows: ClassVar[Counter] = Counter()

        def __call__(self, inputs):
            is_probe = bool((inputs.old_log_probs[inputs.response_mask] == -1).all())
            self.rows["probe" if is_probe else "batch"] += len(inputs.log_probs)
            return super().__call__(inputs)

    Counting.__name__ = kind.__name__
    return Counting


@pytest.mark.parametrize("kind", [GRPO, FSPO, ClipCov, FSPOAdaptive], ids=lambda kind: kind.name)
def test_a_rule_is_evaluated_once_for_each_learned_row(kind):
    model, rule = make_model(), counting(kind)
    batch = off_policy_batch(model, kind())
    learner = make_learner(model, rule(), num_minibatches=3, num_epochs=2, max_tokens_per_micro_batch=60)
    start = scored(learner, batch)
    rule.rows.clear()
    _, updates = learner.update(start)
    assert len(updates) == 6
    assert rule.rows["batch"] == 2 * len(batch)
    assert 0 < rule.rows["probe"] <= 6 * 2 * len(batch.lengths.unique()), "one row per length and sign in every update"


def test_the_old_log_probs_of_the_first_minibatch_take_no_pass_of_their_own():
    model = make_model()
    batch = off_policy_batch(model, GRPO())
    learner = make_learner(model, GRPO(), num_minibatches=3)
    seen = Counter()
    learner.model.register_forward_pre_hook(
        lambda module, given: seen.update({torch.is_grad_enabled(): len(given[0].input_ids)})
    )
    start = scored(learner, batch)
    assert seen == {}
    done, _ = learner.update(start)
    silent = int((batch.advantages == 0).sum())
    assert seen == {False: 12 + silent, True: 18 - silent}
    assert (done.old_log_probs[done.response_mask] != 0).all()


def test_at_ratio_1_the_weight_of_a_response_is_its_fraction_of_kept_tokens():
    torch.manual_seed(0)
    mask = torch.arange(12) < torch.tensor([12, 9, 7, 4])[:, None]
    log_probs = torch.where(mask, -3 * torch.rand(4, 12), 0.0)
    inputs = ClipInputs(log_probs, log_probs.clone(), torch.tensor([[1.5], [-0.5], [1.0], [-2.0]]), mask)
    rule = ClipCov(fraction=0.3, cov_low=-1e6, cov_high=1e6)
    dropped = rule(inputs).clipped.sum(-1)
    assert dropped.sum() == 9  # out of 32 tokens
    torch.testing.assert_close(table_of(rule, inputs).weight, 1 - dropped / mask.sum(-1))


def test_the_rule_is_five_calls_below_the_training_loop():
    found = []

    class Looking(GRPO):
        def __call__(self, inputs):
            frames = traceback.extract_stack()[:-1]
            if not (inputs.old_log_probs[inputs.response_mask] == -1).all():  # not the measurement at ratio 1
                found.append([frame.name for frame in frames if "rlzoo/learner" in frame.filename])
            return super().__call__(inputs)

    model = make_model()
    learner = make_learner(model, Looking())
    learner.update(scored(learner, off_policy_batch(model, GRPO())))
    assert found
    assert {tuple(calls) for calls in found} == {("update", "accumulate", "judgement", "judge")}, "and the rule is the fifth"


@pytest.mark.parametrize(
    ("rule", "dtype", "settings"),
    [
        (GRPO(), torch.float32, {}),
        pytest.param(GRPO(), torch.bfloat16, {}, marks=pytest.mark.long),
        pytest.param(FSPO(), torch.bfloat16, {"kl_coef": 0.1}, marks=pytest.mark.long),
        pytest.param(FSPO(), torch.bfloat16, {"packing": True}, marks=pytest.mark.long),
        pytest.param(ClipCov(), torch.bfloat16, {}, marks=pytest.mark.long),
    ],
    ids=["float32", "bfloat16", "kl", "packing", "scope batch"],
)
def test_with_unchanged_weights_every_log_ratio_is_exactly_0(rule, dtype, settings):
    model = make_wide_model().to(dtype)
    batch = off_policy_batch(model.float(), rule)
    learner = make_learner(
        model.to(dtype), rule, lr=1e-30, num_minibatches=3, num_epochs=2, max_tokens_per_micro_batch=200, **settings
    )
    rewards = torch.where(batch.group_ids == 1, 0.5, batch.rewards)  # these rows have advantage 0 and no backward pass
    batch, updates = learner.update(learner.score(dataclasses.replace(batch, rewards=rewards)))
    assert (batch.advantages == 0).sum() == 6
    assert len(updates) == 6
    for update in updates:
        assert torch.equal(update.minibatch.log_probs, batch.old_log_probs[update.minibatch.rows])
    if settings.get("kl_coef"):
        assert torch.equal(batch.ref_log_probs[batch.response_mask], batch.old_log_probs[batch.response_mask])


def make_wide_model():
    """Return a model in which rounding depends on the rows that share a pass."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=512,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            initializer_range=0.06,
        )
    )
