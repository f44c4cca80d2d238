"""The gradient of a step equals a plain computation's, and does not depend on the split into micro-batches."""

import copy
import dataclasses
import math

import pytest
import torch
from rlzoo_grpo import GRPO

from rlzoo import load_zoo
from rlzoo.config.sections import LearnerConfig
from rlzoo.core.errors import RunError, UserError
from rlzoo.learner.learner import Learner
from rlzoo.learner.optimization import make_scheduler
from tests import oracle
from tests.off_policy import (
    PAD,
    make_model,
    off_policy_batch,
    plain_log_probs,
    reordered,
    take_step,
    take_updates,
    with_token_advantages,
)
from tests.processes.worker import with_unused_parts
from tests.rules import by_inputs, few


def make_learner(model, policy, *, padding_side="right", num_updates=10, reward=None, **settings):
    settings = {"max_grad_norm": None, "lr": 1e-3, **settings}
    learner = Learner(
        copy.deepcopy(model),
        policy,
        LearnerConfig(**settings),
        pad_id=PAD,
        max_length=30,
        num_updates=num_updates,
        reward=reward,
    )
    learner.micro_batches.padding_side = padding_side
    return learner


def step_gradient(model, policy, batch, **settings):
    learner = make_learner(model, policy, **settings)
    objective = learner.accumulate(batch, torch.arange(len(batch))).objective
    gradient = torch.cat([parameter.grad.flatten() for parameter in learner.model.parameters()])
    return -gradient, objective


def relative_error(got, expected):
    return float((got - expected).norm() / expected.norm())


@pytest.fixture(scope="module")
def model():
    return make_model()


def plain_gradient(model, batch, derivative):
    """Return the model gradient of sum(derivative * log_probs), row by row: no padding, no chunks, no micro-batches."""
    model = copy.deepcopy(model).double()
    for row, sequence in enumerate(batch.sequences):
        length = len(sequence) - int(batch.prompt_lengths[row])
        weights = torch.from_numpy(derivative[row, :length])
        logits = model(input_ids=sequence[None]).logits[0]
        picked = logits.log_softmax(-1)[:-1].gather(-1, sequence[1:, None])[:, 0]
        (picked[-length:] * weights).sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@torch.no_grad()
def current_log_probs(model, batch):
    """Return float64 ``(B, T)``, row by row."""
    current = torch.zeros(batch.response_mask.shape, dtype=torch.float64)
    for row, sequence in enumerate(batch.sequences):
        length = len(sequence) - int(batch.prompt_lengths[row])
        current[row, :length] = plain_log_probs(model, sequence, length)
    return current


def oracle_step(model, policy, batch, **options):
    """Return the value and the model gradient of one step, from the oracle."""
    mask = batch.response_mask.numpy()
    current, old = current_log_probs(model, batch).numpy(), batch.old_log_probs.double().numpy()
    expected = getattr(oracle, policy.name)(current, old, batch.advantages.double().numpy(), mask, **options)
    groups = {"groups": batch.group_ids.tolist()}
    value, _ = oracle.reduce(expected.objective, mask, policy.reduction, **groups)
    return value, plain_gradient(model, batch, oracle.gradient(expected, mask, policy.reduction, **groups))


@pytest.mark.parametrize("max_tokens", few([100, 1, 100_000]))
def test_gradient_equals_the_float64_oracle(model, policy, max_tokens):
    batch = off_policy_batch(model, policy)
    value, expected = oracle_step(model, policy, batch)
    gradient, objective = step_gradient(model, policy, batch, max_tokens_per_micro_batch=max_tokens)
    assert objective == pytest.approx(value, rel=1e-5)
    assert relative_error(gradient.double(), expected) < 1e-5


@pytest.mark.parametrize("max_tokens", [1, 100, 100_000])
@pytest.mark.parametrize("reduction", ["sequence_mean", "token_mean"])
def test_gradient_equals_the_oracle_where_advantages_differ_by_token(model, reduction, max_tokens):
    policy = GRPO(reduction=reduction)
    batch = with_token_advantages(off_policy_batch(model, policy))
    value, expected = oracle_step(model, policy, batch)
    gradient, objective = step_gradient(model, policy, batch, max_tokens_per_micro_batch=max_tokens)
    assert objective == pytest.approx(value, rel=1e-5)
    assert relative_error(gradient.double(), expected) < 1e-5


def test_a_step_with_token_advantages_does_not_depend_on_the_micro_batches(model):
    batch = with_token_advantages(off_policy_batch(model, GRPO()))
    whole, objective = step_gradient(model, GRPO(), batch, max_tokens_per_micro_batch=100_000)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(5))
    at_once = type("WholeStep", (GRPO,), {"scope": "batch", "__doc__": GRPO.__doc__})()
    for policy, rows, max_tokens in ((GRPO(), batch, 1), (GRPO(), batch, 60), (at_once, batch, 60),
                                     (GRPO(), reordered(batch, order), 60)):  # fmt: skip
        cut, cut_objective = step_gradient(model, policy, rows, max_tokens_per_micro_batch=max_tokens)
        assert relative_error(cut, whole) < 1e-5
        assert cut_objective == pytest.approx(objective, rel=1e-5)


def narrow(policy):
    """Return the policy, with a narrower band if it looks at probabilities, which are small in a model with random weights."""
    return policy.scaled(0.1) if policy.ratio_to_sampler else policy


@pytest.mark.parametrize("name", by_inputs())
def test_every_policy_gives_one_gradient_for_any_micro_batch_size_and_padding_side(model, name):
    policy = narrow(load_zoo()[name]())
    batch = off_policy_batch(model, policy)
    whole, objective = step_gradient(model, policy, batch, max_tokens_per_micro_batch=100_000)
    cut, cut_objective = step_gradient(model, policy, batch, max_tokens_per_micro_batch=60, padding_side="left")
    assert whole.norm() > 0
    assert relative_error(cut, whole) < 1e-5
    assert cut_objective == pytest.approx(objective, rel=1e-5, abs=1e-7)


# rules of every scope, and with every kind of need; the laws ask this of every rule
@pytest.mark.parametrize("name", few(["fspo", "kl-cov", "gvpo", "opd", "fspo-turn", "grpo", "bapo", "top-entropy"], 4))
def test_no_policy_depends_on_the_order_of_rows(model, name):
    policy = narrow(load_zoo()[name]())
    batch = off_policy_batch(model, policy)
    expected, _ = step_gradient(model, policy, batch, max_tokens_per_micro_batch=100)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(6))
    shuffled, _ = step_gradient(model, policy, reordered(batch, order), max_tokens_per_micro_batch=100)
    assert relative_error(shuffled, expected) < 1e-5


@pytest.mark.parametrize("settings", [{}, {"kl_coef": 0.3}, {"entropy_coef": 0.1}], ids=["plain", "kl", "entropy"])
def test_the_mean_of_prompts_equals_the_float64_oracle_in_any_micro_batches(model, settings):
    rule = GRPO(reduction="prompt_mean")
    batch = off_policy_batch(model, rule)
    batch = dataclasses.replace(
        batch,
        group_ids=torch.tensor([4, 4, 4, 4, 4, 4, 4, 4, 1, 1, 1, 7, 7, 7, 7, 7, 9, 9]),  # of 8, 3, 5 and 2 responses
        ref_log_probs=batch.old_log_probs,
        rewards=batch.rewards.clone(),
    )
    batch.rewards[[0, 6]], batch.response_mask[16:] = torch.nan, False  # two missing grades with A = 0, and an empty prompt
    whole, objective = step_gradient(model, rule, batch, max_tokens_per_micro_batch=100_000, **settings)
    if not settings:
        kept = batch.response_mask.any(-1).nonzero()[:, 0]
        value, expected = oracle_step(model, rule, reordered(batch, kept))
        assert objective == pytest.approx(value, rel=1e-5)
        assert relative_error(whole.double(), expected) < 1e-5
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(5))
    at_once = type("WholeStep", (GRPO,), {"scope": "batch", "__doc__": GRPO.__doc__})(reduction="prompt_mean")
    cuts = {"max_tokens_per_micro_batch": 60, **settings}
    for policy, rows, how in ((rule, batch, {"padding_side": "left"}), (rule, batch, {"packing": True}), (at_once, batch, {}),
                              (rule, reordered(batch, order), {"max_tokens_per_micro_batch": 1})):  # fmt: skip
        cut, cut_objective = step_gradient(model, policy, rows, **cuts | how)
        assert relative_error(cut, whole) < 1e-5
        assert cut_objective == pytest.approx(objective, rel=1e-5)


@pytest.mark.parametrize("name", ["token_mean", "sequence_mean_token_sum", "constant_length"])
def test_every_reduction_uses_the_counts_of_the_step(model, name):
    policy = GRPO(reduction=name)
    batch = off_policy_batch(model, policy)
    whole, _ = step_gradient(model, policy, batch, max_tokens_per_micro_batch=100_000)
    cut, _ = step_gradient(model, policy, batch, max_tokens_per_micro_batch=60)
    assert relative_error(cut, whole) < 1e-5


def test_the_whole_step_path_gives_the_same_gradient(model, policy):
    # scope "batch" computes g for all rows at once and back-propagates in a second pass, which is exact for every rule
    whole_step = type("WholeStep", (type(policy),), {"scope": "batch", "__doc__": policy.__doc__})()
    batch = off_policy_batch(model, policy)
    expected, objective = step_gradient(model, policy, batch, max_tokens_per_micro_batch=100)
    got, got_objective = step_gradient(model, whole_step, batch, max_tokens_per_micro_batch=100)
    assert relative_error(got, expected) < 1e-5
    assert got_objective == pytest.approx(objective, rel=1e-5)


def test_a_fully_masked_response_is_not_counted(model, policy):
    # the last row's response is emptied; N is then 17 responses, and the gradient of other rows grows by 18/17
    batch = off_policy_batch(model, policy)
    mask = batch.response_mask.clone()
    mask[-1] = False
    emptied = dataclasses.replace(batch, response_mask=mask)
    gradient, _ = step_gradient(model, policy, emptied, max_tokens_per_micro_batch=60)
    rows = torch.arange(len(batch) - 1)
    kept, _ = step_gradient(model, policy, reordered(batch, rows), max_tokens_per_micro_batch=60)
    assert relative_error(gradient, kept) < 1e-5


def test_first_update_is_at_ratio_one_and_later_ones_are_not(model, policy):
    batch = off_policy_batch(model, policy)
    learner = make_learner(model, policy, num_minibatches=3, max_tokens_per_micro_batch=200)
    batch, updates = take_updates(learner, batch, seed=0)
    first, last = updates[0], updates[-1]
    assert len(updates) == 3
    assert sorted(torch.cat([update.minibatch.rows for update in updates]).tolist()) == list(range(18))
    assert first.minibatch.table.token_log_ratio_max.max() < 1e-5
    assert last.minibatch.table.token_log_ratio_max.max() > 1e-3
    visible = batch.response_mask[first.minibatch.rows]
    torch.testing.assert_close(
        first.minibatch.log_probs[visible], batch.old_log_probs[first.minibatch.rows][visible], atol=1e-5, rtol=0
    )


def test_kl_to_the_starting_model_is_zero_at_first_and_pulls_back_later(model):
    batch = off_policy_batch(model, GRPO())
    learner = make_learner(model, GRPO(), kl_coef=0.5, num_minibatches=1, num_epochs=2)
    _, updates = take_updates(learner, batch, seed=0)
    assert updates[0].minibatch.table.kl_sum.abs().max() < 1e-5
    assert updates[1].minibatch.table.kl_sum.sum() > 0


def test_an_update_without_a_signal_does_not_change_the_weights(model, policy):
    batch = off_policy_batch(model, policy)
    idle = dataclasses.replace(batch, advantages=torch.zeros_like(batch.advantages))
    learner = make_learner(model, policy, num_minibatches=2)
    take_updates(learner, batch, seed=0)  # fills AdamW's moments, which would change the weights by themselves
    before = [parameter.clone() for parameter in learner.model.parameters()]
    _, updates = take_updates(learner, idle, seed=1)
    assert updates == []
    assert all(torch.equal(old, new) for old, new in zip(before, learner.model.parameters(), strict=True))


def test_a_model_that_is_not_finite_is_not_updated(model, policy):
    batch = off_policy_batch(model, policy)
    learner = make_learner(model, policy, num_minibatches=1)
    with torch.no_grad():
        next(learner.model.parameters())[5] = math.nan  # one token of the vocabulary, so that most responses stay finite
    before = [parameter.clone() for parameter in learner.model.parameters()]
    update = take_step(learner, batch)
    assert update.skipped
    assert not math.isfinite(update.grad_norm)
    after = learner.model.parameters()
    assert all(bool(((old == new) | old.isnan()).all()) for old, new in zip(before, after, strict=True))
    assert learner.num_optimizer_steps == 0


def test_gradient_clipping_is_reported_and_bounds_the_step(model, policy):
    batch = off_policy_batch(model, policy)
    learner = make_learner(model, policy, max_grad_norm=1e-3, num_minibatches=1)
    _, (update,) = take_updates(learner, batch, seed=0)
    assert update.grad_clipped
    assert update.grad_norm > 1e-3


def test_an_adaptive_policy_is_replaced_after_every_update(model):
    from rlzoo_fspo import FSPO

    class Tracking(FSPO):
        """Follows the observed drift."""

        def updated(self, stats):
            assert stats.num_responses.sum() == 5  # six rows per minibatch, one of them with A = 0
            return self.replace(drift=float(stats.log_ratio.sum() / stats.length.sum()))

    batch = off_policy_batch(model, FSPO())
    advantages = torch.ones_like(batch.advantages)
    learner = make_learner(model, Tracking(), num_minibatches=3, lr=1e-2)
    order = torch.randperm(18, generator=torch.Generator().manual_seed(0)).chunk(3)
    advantages[torch.stack([rows[0] for rows in order])] = 0
    take_updates(learner, dataclasses.replace(batch, advantages=advantages), seed=0)
    assert learner.policy.drift != 0
    assert learner.policy.width_high == FSPO().width_high


def test_learning_rate_warms_up_and_decays(model, policy):
    batch = off_policy_batch(model, policy)
    learner = make_learner(model, policy, schedule="linear", warmup_updates=2, num_updates=4, num_minibatches=4)
    _, updates = take_updates(learner, batch, seed=0)
    # half of 1e-3 and all of it in warm-up, then 1e-3, falling to 0 over the remaining two steps
    assert [update.lr for update in updates] == pytest.approx([5e-4, 1e-3, 1e-3, 5e-4])


@pytest.mark.parametrize(
    ("schedule", "factors"),
    # a third more in each update of the warm-up; then 4/4, 3/4, 2/4, 1/4 of the updates are left
    [
        ("constant", [1.0, 1.0, 1.0, 1.0]),
        ("linear", [1.0, 0.75, 0.5, 0.25]),
        ("cosine", [1.0, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2]),
    ],
)
def test_the_first_update_of_a_warm_up_learns_and_its_last_one_has_the_whole_learning_rate(schedule, factors):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = make_scheduler(optimizer, LearnerConfig(schedule=schedule, warmup_updates=3), num_updates=7)
    rates = []
    for _ in range(7):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.5 / 3, 1.0 / 3, 0.5, *(0.5 * factor for factor in factors)])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_scoring_with_a_model_that_is_not_finite_ends_the_run(value):
    batch = off_policy_batch(make_model(), GRPO())
    learner = make_learner(make_model(), GRPO(), kl_coef=0.1)
    with torch.no_grad():
        next(learner.reference.parameters())[7] = value
    assert learner.log_probs(batch).isfinite().all()
    with pytest.raises(RunError, match=r"the model's logits are not finite for [0-9]+ of [0-9]+ tokens"):
        learner.score(batch)


def test_tokens_that_the_reference_never_generates_leave_a_finite_update():
    batch = off_policy_batch(make_model(), GRPO())
    learner = make_learner(make_model(), GRPO(), kl_coef=0.1, kl_estimator="k3", num_minibatches=1)

    def ban(head, states, logits):
        return logits.index_fill(-1, torch.arange(2, 20), -torch.inf)

    learner.reference.language_model.lm_head.register_forward_hook(ban)
    scored = learner.score(batch)
    assert bool((scored.ref_log_probs == -1e6).any())
    _, (update,) = learner.update(scored)
    assert not update.skipped
    assert 0 < update.grad_norm < 1e3


def test_parameters_unreachable_from_text_are_frozen_but_idle_experts_are_not():
    learner = make_learner(with_unused_parts(make_model()), GRPO())
    frozen = [name for name, parameter in learner.language_model.named_parameters() if not parameter.requires_grad]
    assert frozen == ["tower.weight", "tower.bias"]
    assert learner.accelerator.ddp_handler.find_unused_parameters
    assert make_learner(make_model(), GRPO()).accelerator.ddp_handler is None


class WithoutBackward(torch.nn.Module):
    def forward(self, states):
        if torch.is_grad_enabled():
            raise NotImplementedError("no backward pass on this device")
        return states


def test_a_model_without_a_backward_pass_is_refused_in_one_line():
    model = make_model()
    model.model.layers[0].mlp = WithoutBackward()
    with pytest.raises(UserError, match=r"training pass of Qwen3ForCausalLM .* 'sdpa' fails \(NotImplementedError: no back"):
        make_learner(model, GRPO())
