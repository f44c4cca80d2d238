"""A rule receives the inputs in its ``needs``, filled from the batch, and nothing else; groups and metrics stay whole."""

import dataclasses
from typing import ClassVar

import pytest
import torch
from rlzoo_grpo import GRPO

from rlzoo import ClipPolicy, ClipResult, RunConfig, UserError, ops
from rlzoo.core.errors import PolicyError
from rlzoo.core.policy import contract_problem
from rlzoo.core.types import NEEDS
from tests.learner.test_learner import make_learner, relative_error, step_gradient
from tests.off_policy import make_model, off_policy_batch, scored


class Everything(GRPO):
    """GRPO that stores the inputs of every call."""

    name, scope = "everything", "batch"
    needs = frozenset(NEEDS)
    seen: ClassVar[list] = []

    def __call__(self, inputs):
        self.seen.append(inputs)
        return super().__call__(inputs)


class PerRow(Everything):
    """The same, with inputs per row and without the group."""

    name, scope = "per-row", "token"
    needs = frozenset(NEEDS) - {"group_ids"}


class CentredInGroups(ClipPolicy):
    """A rule that compares summed log-ratios within a group."""

    name, paper, scope = "centred-in-groups", "none", "batch"
    needs = frozenset({"group_ids", "rewards"})
    learns_without_advantages = True

    def __call__(self, inputs):
        total = ops.sequence_sum(ops.log_ratio(inputs), inputs.response_mask)
        centred = total - ops.group_mean(total, inputs.group_ids)
        gap = inputs.rewards - ops.group_mean(inputs.rewards, inputs.group_ids)
        none = torch.zeros_like(total, dtype=torch.bool)
        return ClipResult(-(0.1 * centred - gap).square(), total.detach(), none)


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture
def batch(model):
    made = off_policy_batch(model, GRPO())
    return dataclasses.replace(made, finished=torch.arange(len(made)) % 3 > 0)


def test_what_a_rule_needs_is_filled_from_the_batch(model, batch):
    learner = make_learner(model, Everything(), num_minibatches=2, num_epochs=2, num_updates=8)
    start = scored(learner, batch)
    Everything.seen.clear()
    _, updates = learner.update(start)
    seen = Everything.seen[::2]  # each is followed by one at ratio 1, the reference for importance weights
    assert len(updates[0].minibatch.rows) == 12, "of three groups, the first minibatch has two"
    entropy, reference = learner.micro_batches.log_probs(learner.model, batch)[1], start.ref_log_probs
    assert not torch.equal(reference, torch.zeros_like(reference))
    for inputs, update, progress in zip(seen, updates, (0.0, 0.125, 0.25, 0.375), strict=True):
        rows, mask = update.minibatch.rows, batch.response_mask[update.minibatch.rows]
        assert inputs.progress == progress
        assert inputs.max_length == 30
        assert inputs.rewards.tolist() == batch.rewards[rows, None].tolist()
        assert inputs.finished.tolist() == batch.finished[rows, None].tolist()
        assert inputs.group_ids.tolist() == batch.group_ids[rows, None].tolist()
        assert inputs.turn_ids.tolist() == batch.turn_ids[rows].tolist()
        torch.testing.assert_close(inputs.ref_log_probs, reference[rows])
        for row, ids, chosen in zip(rows.tolist(), inputs.token_ids, mask, strict=True):
            response = batch.sequences[row][int(batch.prompt_lengths[row]) :]
            assert ids[chosen].tolist() == response[chosen[: len(response)]].tolist()
            assert not ids[~chosen].any()
    fresh = make_learner(model, GRPO())
    expected = fresh.micro_batches.log_probs(fresh.model, batch)[1]
    for inputs, update in zip(seen, updates, strict=True):  # those of the first minibatch come from its own forward pass
        torch.testing.assert_close(inputs.old_entropy, expected[update.minibatch.rows], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(entropy, expected, atol=1e-4), "the weights have moved since"


def test_a_rule_of_scope_token_gets_the_same_in_every_micro_batch(model, batch):
    learner = make_learner(model, PerRow(), num_minibatches=1, max_tokens_per_micro_batch=60)
    start = scored(learner, batch)
    PerRow.seen.clear()
    learner.update(start)
    *seen, _ = PerRow.seen  # the last is at ratio 1
    assert len(seen) > 3
    for name, expected in (("rewards", batch.rewards), ("finished", batch.finished)):
        given = torch.cat([getattr(inputs, name) for inputs in seen])
        assert sorted(given.flatten().tolist()) == sorted(expected.tolist())
    assert not any("group_ids" in {field.name for field in dataclasses.fields(inputs)} for inputs in seen)


def test_a_rule_without_needs_gets_nothing_and_may_read_nothing(model, batch):
    class Plain(Everything):
        name, scope, needs = "plain", "token", frozenset()
        seen: ClassVar[list] = []

    learner = make_learner(model, Plain(), num_minibatches=2)
    start = scored(learner, batch)
    assert start.ref_log_probs is None
    assert learner.update(start)[0].old_entropy is None
    for name in NEEDS:
        with pytest.raises(PolicyError, match=f"^rule 'plain' reads inputs.{name}, but does not name it in `needs`"):
            getattr(Plain.seen[0], name, None)
    moved = dataclasses.replace(Plain.seen[0], advantages=-Plain.seen[0].advantages)  # a copy is as limited
    with pytest.raises(PolicyError):
        getattr(moved, "group_ids", None)


def test_minibatches_by_prompts_hold_whole_groups(model, batch):
    learner = make_learner(model, GRPO(), num_minibatches=2, num_epochs=2, minibatch_by="prompts")
    minibatches = learner.minibatches(batch, 3)
    assert [len(rows) for rows in minibatches[:2]] == [12, 6]
    assert sorted(map(len, minibatches[2:])) == [6, 12]
    for rows in minibatches:
        groups = batch.group_ids[rows].unique()
        assert sorted(rows.tolist()) == torch.isin(batch.group_ids, groups).nonzero()[:, 0].tolist()
    drawn = {tuple(batch.group_ids[learner.minibatches(batch, seed)[1]].unique().tolist()) for seed in range(20)}
    assert drawn == {(0,), (1,), (2,)}


def test_a_group_rule_has_one_gradient_for_any_micro_batches(model, batch):
    whole, objective = step_gradient(model, CentredInGroups(), batch)
    for size in (40, 100):
        gradient, value = step_gradient(model, CentredInGroups(), batch, max_tokens_per_micro_batch=size)
        assert relative_error(gradient, whole) < 1e-5
        assert value == pytest.approx(objective, rel=1e-5)
    log_probs = make_learner(model, GRPO()).log_probs(batch).double()
    total = ((log_probs - batch.old_log_probs) * batch.response_mask).sum(-1)
    rewards, expected = batch.rewards.double(), 0.0
    for group in range(3):
        own = batch.group_ids == group
        gap = 0.1 * (total[own] - total[own].mean()) - (rewards[own] - rewards[own].mean())
        expected -= float(gap.square().sum()) / len(batch)
    assert objective == pytest.approx(expected, rel=1e-4)


def test_a_rule_that_compares_a_group_draws_minibatches_by_prompts(tmp_path):
    path = tmp_path / "centred.py"
    path.write_text(
        "from rlzoo import hookimpl\nfrom tests.learner.test_needs import CentredInGroups\n"
        "@hookimpl\ndef rlzoo_clip_policies():\n    return [CentredInGroups]\n"
    )
    config = RunConfig.compose(clip="centred-in-groups", plugins=[path])
    assert config.learner.minibatch_by is None
    with pytest.raises(UserError, match=r"use learner\.minibatch_by=prompts"):
        RunConfig.compose(clip="centred-in-groups", plugins=[path], overrides=["learner.minibatch_by=responses"])
    with pytest.raises(UserError, match="more than the 2 prompts in a step"):
        RunConfig.compose(
            clip="centred-in-groups", plugins=[path], overrides=["rollout.num_prompts=2", "learner.num_minibatches=3"]
        )


@pytest.mark.parametrize(
    ("needs", "scope", "problem"),
    [
        ({"group_id"}, "batch", "needs 'group_id', which is not an optional input (known: group_ids, "),
        (["group_ids"], "batch", "declares needs = ['group_ids']; it must be a frozenset"),
        ({"group_ids"}, "sequence", "needs group_ids with scope 'sequence': the rule compares responses"),
        ({"log_probs"}, "token", "needs 'log_probs', which is not an optional input"),
    ],
)
def test_needs_that_cannot_be_met_are_refused(needs, scope, problem):
    made = type("Odd", (GRPO,), {"name": "odd", "scope": scope, "needs": needs, "__module__": __name__})
    assert contract_problem(made).startswith(problem)


class Reporting(GRPO):
    """GRPO that reports one metric per response and one per token."""

    name = "reporting"

    def __call__(self, inputs):
        result = super().__call__(inputs)
        token = torch.where(inputs.response_mask, ops.log_ratio(inputs).detach().abs(), torch.nan)
        return dataclasses.replace(result, metrics={"length": ops.lengths(inputs.response_mask), "move": token})


def test_metrics_of_a_rule_are_means_over_the_responses(model, batch):
    for size in (60, 100_000):
        learner = make_learner(model, Reporting(), max_tokens_per_micro_batch=size)
        measured = learner.accumulate(batch, torch.arange(len(batch)))
        assert measured.rule_metrics["length"] == pytest.approx(float(batch.lengths.float().mean()))
        move = (learner.log_probs(batch) - batch.old_log_probs).abs() * batch.response_mask
        assert measured.rule_metrics["move"] == pytest.approx(float((move.sum(-1) / batch.lengths).mean()), rel=1e-4)


@pytest.mark.parametrize(
    ("metrics", "problem"),
    [
        ({"Length": torch.ones(18, 1)}, "returned a metric called 'Length'; names must consist of lower-case"),
        ({"length": torch.ones(18)}, r"returned metric 'length' of shape \(18,\), expected \(\d+, 1\) or \(\d+, 30\)"),
        ({"length": 3.0}, "returned metric 'length' of shape float"),
        ([("length", 1)], "returned metrics of type list, expected a dictionary"),
    ],
)
def test_metrics_of_another_form_are_refused(model, batch, metrics, problem):
    class Odd(GRPO):
        name = "odd"

        def __call__(self, inputs):
            return dataclasses.replace(super().__call__(inputs), metrics=metrics)

    with pytest.raises(PolicyError, match=problem):
        make_learner(model, Odd()).accumulate(batch, torch.arange(len(batch)))


def test_metrics_that_only_some_rows_have_are_refused(model, batch):
    class Odd(GRPO):
        name = "odd"

        def __call__(self, inputs):
            length = ops.lengths(inputs.response_mask)
            return dataclasses.replace(super().__call__(inputs), metrics={"long": length} if (length > 20).any() else {})

    with pytest.raises(PolicyError, match="for some responses and"):
        make_learner(model, Odd(), max_tokens_per_micro_batch=40).accumulate(batch, torch.arange(len(batch)))
