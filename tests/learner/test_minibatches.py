"""A rollout batch is cut into exactly the configured number of minibatches, and each advances the learning-rate schedule."""

import dataclasses

import pytest
import torch
from rlzoo_covariance import KLCov
from rlzoo_grpo import GRPO
from rlzoo_opmd import OPMD

import rlzoo
from rlzoo import RunConfig
from rlzoo.gate.enter import enter
from rlzoo.gate.memory import rows_per_step
from rlzoo.training.loop import steps
from rlzoo.training.run import Run
from tests.learner.test_learner import make_learner, relative_error, step_gradient
from tests.off_policy import make_model, off_policy_batch, reordered, take_step, take_updates
from tests.training.short import quick


@pytest.fixture(scope="module")
def model():
    return make_model()


def updates_of(model, policy, number, num_minibatches, **settings):
    batch = off_policy_batch(model, policy)
    kept = reordered(batch, torch.arange(len(batch))[:number])
    learner = make_learner(model, policy, num_minibatches=num_minibatches, num_updates=num_minibatches, **settings)
    return take_updates(learner, kept, seed=0)[1], learner


@pytest.mark.parametrize(("number", "sizes"), [(9, [3, 2, 2, 2]), (10, [3, 3, 2, 2]), (8, [2, 2, 2, 2])])
def test_num_minibatches_that_does_not_divide_the_responses(model, number, sizes):
    updates, learner = updates_of(model, GRPO(), number, 4, schedule="linear")
    assert [len(update.minibatch.rows) for update in updates] == sizes
    assert sorted(torch.cat([update.minibatch.rows for update in updates]).tolist()) == list(range(number))
    assert [update.lr for update in updates] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
    assert learner.scheduler.get_last_lr() == [0.0]


def test_fewer_responses_than_minibatches_complete_the_schedule(model):
    updates, learner = updates_of(model, GRPO(), 3, 4, schedule="linear")
    assert [len(update.minibatch.rows) for update in updates] == [1, 1, 1]
    assert learner.scheduler.get_last_lr() == [0.0]


def test_a_skipped_update_advances_the_learning_rate(model):
    batch = off_policy_batch(model, GRPO())
    idle = dataclasses.replace(batch, advantages=torch.zeros_like(batch.advantages))
    learner = make_learner(model, GRPO(), schedule="linear", num_minibatches=2, num_updates=4)
    _, none = take_updates(learner, idle, seed=0)
    _, taken = take_updates(learner, batch, seed=1)
    assert none == []
    assert [update.skipped for update in taken] == [False, False]
    assert [update.lr for update in taken] == pytest.approx([5e-4, 2.5e-4])
    assert learner.num_optimizer_steps == 2


def test_a_batch_without_any_advantage_advances_the_learning_rate(tmp_path, monkeypatch):
    (tmp_path / "pay_nothing.py").write_text("def pay(problem, response):\n    return 0.0\n")
    monkeypatch.chdir(tmp_path)
    overrides = ["task.reward=pay_nothing:pay", "eval.num_problems=0", "tracking.mlflow=false", "learner.schedule=linear"]
    config = quick(tmp_path / "run", clip="grpo", overrides=overrides)
    run = Run(enter(config, config.task))
    for step, row, _ in steps(run):
        run.directory.log(step, row)
        run.complete(step)
    assert (run.learner.num_optimizer_steps, run.learner.scheduler.get_last_lr()) == (0, [0.0])
    run.leave()


@pytest.mark.parametrize(("processes", "rows"), [(1, 3), (2, 2)])
def test_the_planner_uses_the_largest_minibatch(processes, rows):
    shape = ["rollout.num_prompts=5", "rollout.group_size=2", "learner.num_minibatches=4"]  # 3, 3, 2, 2 responses
    assert rows_per_step(RunConfig.compose(clip="grpo", overrides=shape), processes) == rows


def test_a_minibatch_without_advantages_keeps_the_penalty_of_a_rule_that_learns_there(model):
    # OPMD at A = 0: J = -tau / 2 S^2 per response, whose gradient at old log-probs away from the model's is not 0
    batch = off_policy_batch(model, OPMD())
    idle = dataclasses.replace(batch, advantages=torch.zeros_like(batch.advantages))
    learner = make_learner(model, OPMD())
    before = torch.cat([parameter.detach().flatten().clone() for parameter in learner.model.parameters()])
    update = take_step(learner, idle)
    after = torch.cat([parameter.detach().flatten() for parameter in learner.model.parameters()])
    assert not update.skipped
    assert update.grad_norm > 1
    assert not torch.equal(before, after)


def test_a_rule_without_advantages_has_one_gradient_for_any_micro_batches(model):
    batch = off_policy_batch(model, OPMD())
    advantages = batch.advantages.clone()
    advantages[::2] = 0
    batch = dataclasses.replace(batch, advantages=advantages)
    whole, _ = step_gradient(model, OPMD(), batch, max_tokens_per_micro_batch=100_000)
    cut, _ = step_gradient(model, OPMD(), batch, max_tokens_per_micro_batch=60)
    assert relative_error(cut, whole) < 1e-5


def test_momentum_alone_does_not_change_the_weights(model):
    # kl-cov penalises none of several equal covariances, and without advantages all are 0: it has no gradient
    batch = off_policy_batch(model, KLCov())
    idle = dataclasses.replace(batch, advantages=torch.zeros_like(batch.advantages))
    learner = make_learner(model, KLCov(), num_minibatches=2)
    take_updates(learner, batch, seed=0)  # fills AdamW's moments
    before = [parameter.clone() for parameter in learner.model.parameters()]
    _, updates = take_updates(learner, idle, seed=1)
    assert [update.skipped for update in updates] == [True, True]
    assert all(torch.equal(old, new) for old, new in zip(before, learner.model.parameters(), strict=True))


def test_a_run_learns_from_a_batch_without_advantages_if_the_rule_does(tmp_path, monkeypatch):
    (tmp_path / "pay_none.py").write_text("def pay(problem, response):\n    return 0.0\n")
    monkeypatch.chdir(tmp_path)
    overrides = ["task.reward=pay_none:pay", "eval.num_problems=0", "tracking.mlflow=false"]
    result = rlzoo.train(quick(tmp_path / "run", clip="opmd", steps=1, overrides=overrides))
    assert "learner/grad_norm" in result.metrics[-1]
