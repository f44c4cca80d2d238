"""Groups with equal rewards can be left out of a step, as if they had not been sampled."""

import dataclasses

import pytest
import torch
from rlzoo_grpo import GRPO
from rlzoo_m2po import M2PO

import rlzoo
from rlzoo import RunConfig, UserError, load_zoo
from rlzoo.config.sections import RewardConfig
from rlzoo.journal.rollout_file import RolloutFile
from rlzoo.lab.recorded import RecordedRun
from rlzoo.lab.replay import replay
from tests.learner.test_learner import make_learner
from tests.off_policy import make_model, off_policy_batch, reordered
from tests.rules import few
from tests.training.short import interrupted, lines, quick, resumes_after, without_times

REWARDS = torch.tensor([1.0, 0, 1, 1, 0, 0,  0.1, 0.1, 0.1, 0.1, torch.nan, 0.1,  0, 0, 0, 0, 0, 1])  # fmt: skip
KEPT = torch.tensor([0, 1, 2, 3, 4, 5, 12, 13, 14, 15, 16, 17])


def weights(learner):
    return torch.cat([parameter.detach().flatten() for parameter in learner.model.parameters()])


@pytest.mark.parametrize("settings", few([{"kl_coef": 0.1, "entropy_coef": 0.01, "num_epochs": 2}, {}]), ids=["kl", "plain"])
@pytest.mark.parametrize("minibatch_by", ["responses", "prompts"])
@pytest.mark.parametrize(
    "rule", few([GRPO(reduction="token_mean"), M2PO(), GRPO()], 2), ids=lambda rule: f"{rule.name} {rule.reduction}"
)
def test_a_step_is_that_of_the_other_groups_alone(rule, minibatch_by, settings):
    model = make_model()
    batch = dataclasses.replace(off_policy_batch(model, rule), rewards=REWARDS)
    settings = {"num_minibatches": 2, "minibatch_by": minibatch_by, "max_tokens_per_micro_batch": 100, **settings}
    learner = make_learner(model, rule, ignore_equal_groups=True, **settings)
    got, updates = learner.update(learner.score(batch, 3))
    alone = make_learner(model, rule, **settings)
    kept, expected = alone.update(alone.score(reordered(batch, KEPT), 3))
    torch.testing.assert_close(weights(learner), weights(alone), rtol=0, atol=1e-6)
    assert (weights(learner) - weights(make_learner(model, rule))).norm() > 1e-3
    for one, other in zip(updates, expected, strict=True):
        assert one.minibatch.rows.tolist() == KEPT[other.minibatch.rows].tolist()
        assert one.minibatch.objective == pytest.approx(other.minibatch.objective, rel=1e-4, abs=1e-7)
    # all rows are scored
    torch.testing.assert_close(got.old_log_probs[KEPT], kept.old_log_probs, atol=1e-5, rtol=0)
    assert (got.old_log_probs[got.response_mask] != 0).all()


def test_a_group_is_equal_if_all_named_rewards_that_the_estimator_compares_are():
    model, rewards = make_model(), torch.ones(18)
    parts = {"a": torch.arange(18.0) // 6, "b": 3 - torch.arange(18.0) // 6, "c": torch.arange(18.0)}
    batch = dataclasses.replace(off_policy_batch(model, GRPO()), rewards=rewards, reward_parts=parts)
    parts["a"][8] = 0.0
    for estimator, unweighted, ignored in (("group_norm", "c", 18), ("gdpo", "c", 12), ("gdpo", "b", 0)):
        reward = RewardConfig(weights={unweighted: 0.0})
        learner = make_learner(model, GRPO(advantage=estimator), reward=reward, ignore_equal_groups=True, num_minibatches=2)
        assert sum(map(len, learner._ignored(batch))) == ignored
        assert sum(map(len, learner.minibatches(batch, 0))) == 18 - ignored


def test_a_step_of_equal_groups_moves_no_weight_and_advances_the_schedule():
    model = make_model()
    batch = dataclasses.replace(off_policy_batch(model, GRPO()), rewards=torch.ones(18))
    for settings in ({}, {"kl_coef": 0.1, "minibatch_by": "prompts"}):
        settings |= {"ignore_equal_groups": True, "schedule": "linear", "num_minibatches": 2}
        learner = make_learner(model, GRPO(), num_updates=2, **settings)
        _, updates = learner.update(learner.score(batch))
        assert (updates, learner.scheduler.get_last_lr()) == ([], [0.0])
        assert torch.equal(weights(learner), weights(make_learner(model, GRPO())))


SETTINGS = ["clip.reduction=prompt_mean", "learner.ignore_equal_groups=true", "rollout.group_size=2", "eval.num_problems=0",
            "tracking.mlflow=false", "learner.num_minibatches=2", "checkpoint.every=1"]  # fmt: skip


@pytest.mark.long
def test_a_run_with_means_of_prompts_is_recorded_replayed_and_resumed(tmp_path):
    result = rlzoo.train(quick(tmp_path / "run", clip="grpo", steps=3, overrides=SETTINGS))
    run, rewarded = RecordedRun.read(tmp_path / "run"), 0
    assert not run.splits_prompts
    for step, metrics in enumerate(result.metrics[1:], start=1):
        file = RolloutFile.load(tmp_path / "run" / "rollouts" / f"{step:06d}.safetensors")
        pairs = file.rewards.view(-1, 2)
        mixed = (pairs[:, 0] != pairs[:, 1]).repeat_interleave(2)
        trained = torch.cat([update.rows for update in file.updates])
        assert sorted(trained.tolist()) == mixed.nonzero()[:, 0].tolist()
        rewarded += int((~mixed).sum())
        assert metrics["reward/zero_std_groups"] == pytest.approx(float((~mixed).float().mean()))
        again = replay(dataclasses.replace(run, updates=tuple(u for u in run.updates if u.step == step)), run.own_rule)
        for name, value in again.profile.metrics().items():
            assert value == pytest.approx(metrics[name], rel=2e-4, abs=1e-6), name
        assert len(lines(tmp_path / "run" / "rollouts" / f"{step:06d}.jsonl")) == len(file)
    assert rewarded > 0
    stopped = quick(tmp_path / "stopped", clip="grpo", steps=3, overrides=SETTINGS)
    interrupted(stopped, 2)
    with resumes_after(1, stopped.output):
        resumed = rlzoo.train(stopped, resume=True)
    assert without_times(resumed.metrics) == without_times(result.metrics)


def test_what_cannot_have_means_of_prompts_or_equal_groups_is_refused():
    for clip, override, why in (
        (
            "grpo",
            "learner.minibatch_by=responses",
            "grpo with prompt_mean needs all responses to a prompt in one",
        ),
        ("fspo", "steps=1", "reduction 'prompt_mean' needs a per-token objective, but fspo has a per-response objective; use"),
    ):
        with pytest.raises(UserError, match=why):
            RunConfig.compose(clip=clip, overrides=["clip.reduction=prompt_mean", override])
    single = ["rollout.group_size=1", "clip.advantage=batch_norm", "learner.ignore_equal_groups=true"]
    with pytest.raises(UserError, match=r"learner\.ignore_equal_groups=true: needs a rollout.group_size of at least 2"):
        RunConfig.compose(clip="grpo", overrides=single)
    for clip, advantage in (("opd", "reverse_kl"), ("grpo", "gae")):  # which learn from a teacher's or a critic's values
        for setting in ("learner.ignore_equal_groups=true", "rollout.dynamic_sampling=1"):
            with pytest.raises(
                UserError, match=f"{setting}: advantage '{advantage}' also learns from groups with equal rewards"
            ):
                RunConfig.compose(clip=clip, overrides=[f"clip.advantage={advantage}", setting])
    assert load_zoo()["grpo"](reduction="prompt_mean").needs_whole_prompts
