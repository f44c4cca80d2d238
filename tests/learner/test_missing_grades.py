"""A response without a grade is in no baseline, has advantage 0 and is seen by no rule; it counts in the denominators."""

import dataclasses
import math

import pytest
import torch
from rlzoo_covariance import ClipCov
from rlzoo_fspo import FSPO
from rlzoo_grpo import GRPO
from rlzoo_gvpo import GVPO
from rlzoo_real import REAL

import rlzoo
from rlzoo.journal.rollout_file import RolloutFile
from rlzoo.lab.recorded import RecordedRun
from rlzoo.learner.batch import collate
from rlzoo.rollout.types import Rollout, RolloutGroup
from rlzoo.tasks.problem import Problem
from tests.learner.test_learner import make_learner, relative_error, step_gradient
from tests.off_policy import make_model, off_policy_batch, reordered
from tests.rules import few
from tests.training.short import lines, quick

MISSING = torch.tensor([1, 2, 7, 8, 9, 16])  # two prompts keep four or more responses, one keeps three


def groups_of(*rewards):
    return [
        RolloutGroup(Problem("", ""), tuple(Rollout((5,), (6, 1), (0.0, 0.0), "", True, 0, reward) for reward in group))
        for group in rewards
    ]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # the second prompt has one grade, too few to compare; the third has two
        ("group_mean", [-0.25, 0.25, 0, 0, 0, 0, 0, -0.5, 0.5]),
        ("leave_one_out", [-0.5, 0.5, 0, 0, 0, 0, 0, -1, 1]),
        # the mean of -1, -0.5, 0, -1 and 0 is -0.5, and their variance 0.25
        ("batch_norm", [-1, 0, 0, 0, 0, 1, 0, -1, 1]),
        ("raw", [-1, -0.5, 0, 0, 0, 0, 0, -1, 0]),
    ],
)
def test_a_failed_grading_is_in_no_baseline_and_has_advantage_0(estimator, expected):
    groups = groups_of([-1.0, -0.5, None], [None, None, 0.0], [None, -1.0, 0.0])
    assert [group.is_mixed for group in groups] == [True, False, True]
    batch = make_learner(make_model(), GRPO(advantage=estimator)).score(collate(groups))
    torch.testing.assert_close(batch.advantages[:, 0], torch.tensor(expected).float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("settings", few([{"kl_coef": 0.3}, {}, {"entropy_coef": 0.1}]), ids=["kl", "plain", "entropy"])
@pytest.mark.parametrize(
    "rule",
    [GRPO(), GRPO(reduction="token_mean"), FSPO(), ClipCov(), GVPO(), REAL()],
    ids=lambda rule: f"{rule.name} {rule.reduction}",
)
def test_the_gradient_is_that_of_the_graded_responses_with_the_denominators_of_all(rule, settings):
    model = make_model()
    batch = off_policy_batch(model, rule)
    batch = dataclasses.replace(batch, ref_log_probs=batch.old_log_probs)
    rewards, advantages = batch.rewards.clone(), batch.advantages.clone()
    rewards[MISSING], advantages[MISSING] = torch.nan, 0.0
    graded = (~rewards.isnan()).nonzero()[:, 0]
    got, _ = step_gradient(
        model,
        rule,
        dataclasses.replace(batch, rewards=rewards, advantages=advantages),
        max_tokens_per_micro_batch=100,
        **settings,
    )
    alone, _ = step_gradient(model, rule, reordered(batch, graded), **settings)
    per_token = rule.reduction == "token_mean"
    share = batch.lengths[graded].sum() / batch.lengths.sum() if per_token else len(graded) / len(batch)
    assert relative_error(got, alone * share) < 1e-5


def test_a_batch_without_grades_moves_no_weight_and_advances_the_schedule():
    model = make_model()
    learner = make_learner(model, GRPO(), kl_coef=0.1, entropy_coef=0.1, schedule="linear", num_minibatches=2, num_updates=2)
    _, updates = learner.update(learner.score(collate(groups_of([None] * 3, [None] * 3))))
    assert updates == []
    assert learner.scheduler.get_last_lr() == [0.0]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), learner.language_model.parameters(), strict=True))


@pytest.mark.long
@pytest.mark.parametrize("rule", ["fspo", pytest.param("gvpo", marks=pytest.mark.long)])
def test_a_run_counts_missing_grades_and_its_recording_is_replayed_without_them(tmp_path, monkeypatch, rule):
    code = (
        "def penalty(problem, response):\n"
        "    number = sum(response.encode())\n"
        "    if number % 3 == 0: return None\n"
        "    return -0.25 - 0.5 * (number % 2)\n"
    )
    (tmp_path / "penalty_reward.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    settings = ["task.reward=penalty_reward:penalty", "rollout.dynamic_sampling=1", "eval.num_samples=2", "learner.kl_coef=0.1"]
    result = rlzoo.train(quick(tmp_path / "run", clip=rule, overrides=[*settings, "tracking.mlflow=false"]))
    for step, metrics in enumerate(result.metrics[1:], start=1):
        rows = lines(tmp_path / "run" / "rollouts" / f"{step:06d}.jsonl")
        failed = [sum(row["response"].encode()) % 3 == 0 for row in rows]
        assert 0 < sum(failed) < len(rows)
        assert [row["reward"] is None for row in rows] == failed
        assert all(row["advantage"] == 0 for row in rows if row["reward"] is None)
        assert metrics["reward/mean"] == pytest.approx(sum(row["reward"] or 0 for row in rows) / failed.count(False))
        assert 0 < metrics["reward/failed"] < 0.5
        recorded = RolloutFile.load(tmp_path / "run" / "rollouts" / f"{step:06d}.safetensors")
        assert recorded.rewards.isnan().tolist() == failed
    assert 0 < result.metrics[-1]["eval/failed"] < 0.5
    assert -0.75 <= result.metrics[-1]["eval/accuracy"] <= -0.25
    replayed = RecordedRun.read(tmp_path / "run")
    for update in replayed.updates:
        assert update.inputs.rewards.isfinite().all()
    assert sum(update.counts.num_responses for update in replayed.updates) > replayed.num_responses
    assert all(math.isfinite(value) for row in result.metrics for value in row.values())
