"""Replay reproduces what the run itself measured, for every rule, and finds widths for a clip fraction."""

import dataclasses
import json

import pytest
import torch

from rlzoo import load_zoo
from rlzoo.core.errors import UserError
from rlzoo.lab.recorded import RecordedRun
from rlzoo.lab.replay import clip_fraction, match_clip_fraction, replay, replay_matched
from rlzoo.testing.data import filled
from tests.quick import quick_run
from tests.rules import by_inputs, few

DENSE = {"top-entropy": {"top_share": 0.5}}  # with a fifth of the tokens, no width clips a tenth of all
WIDE = [name for name, policy in load_zoo().items() if policy().width_fields()]


def by_step(run, policy):
    """Return the mean of the step's clip decisions over responses with a nonzero advantage, step by step."""
    steps = sorted({update.step for update in run.updates})
    return {step: replay(one_step(run, step), policy).profile for step in steps}


def one_step(run, step):
    return dataclasses.replace(run, updates=tuple(update for update in run.updates if update.step == step))


def test_replaying_the_runs_own_rule_gives_the_metrics_it_logged(trained, recorded):
    for step, profile in by_step(recorded, recorded.own_rule).items():
        logged = trained.metrics[step]
        again = profile.metrics()
        assert len(again) > 60
        for name in again:
            assert again[name] == pytest.approx(logged[name], rel=2e-4, abs=1e-6), name


def test_a_recording_that_is_too_large_for_memory_has_the_same_results(trained, monkeypatch):
    whole = RecordedRun.read(trained.path)
    monkeypatch.setattr("rlzoo.lab.recorded.KEPT", 0)
    monkeypatch.setattr("rlzoo.lab.recorded.available_memory", lambda: 0)
    large = RecordedRun.read(trained.path)
    assert isinstance(whole.updates, tuple) > isinstance(large.updates, tuple)
    for policy in (load_zoo()["fspo"](), load_zoo()["fspo-adaptive"]()):  # the second adapts from update to update
        expected, found = (replay_matched(run, policy, 0.1, by_sign=True) for run in (whole, large))
        assert found.profile == expected.profile
        assert found.widths == expected.widths


@pytest.fixture(scope="module")
def four_epochs(tmp_path_factory):
    """A run that trains on every response four times, in eight updates per step."""
    settings = ["learner.num_epochs=4", "learner.num_minibatches=2"]
    return quick_run(tmp_path_factory.mktemp("epochs") / "run", "fspo", *settings, steps=2)


@pytest.mark.long
def test_all_epochs_of_a_prompt_are_drawn_together_when_updates_are_pooled(four_epochs):
    run = RecordedRun.read(four_epochs.path)
    pooled = replay(run, run.own_rule)
    assert len(pooled.table.group.unique()) == 2 * 12
    _, numbers = pooled.table.group.unique(return_counts=True)
    assert numbers.tolist() == [4 * 4] * 24
    again = pooled.profile.metrics()
    assert again["fairness/lre_max_ci_low"] < again["fairness/lre_max_ci_high"]
    for name, value in four_epochs.profile.metrics().items():
        assert again[name] == pytest.approx(value, rel=2e-4, abs=1e-6), name


@pytest.mark.long
def test_a_corrected_run_is_replayed_with_its_mismatch_weights(tmp_path):
    settings = ["clip.clip_low=0.999", "clip.clip_high=100", "rollout.max_staleness=1"]
    correction = ["correction=mis", "correction.pool=sum", "correction.high=1.0"]  # drops about half
    trained = quick_run(tmp_path / "run", "rloo", *settings, *correction, steps=3)
    run = RecordedRun.read(trained.path, own_code=True)
    for step, profile in by_step(run, run.own_rule).items():
        for name in ("clip/fraction", "fairness/ess", "fairness/gradient_mass_length_bin_0"):
            assert profile.metrics()[name] == pytest.approx(trained.metrics[step][name], rel=1e-3), name
    assert profile.ess < 0.8


def test_per_token_weights_are_refused_for_a_response_rule(recorded):
    weights = torch.ones_like(recorded.updates[0].inputs.log_probs)
    run = dataclasses.replace(recorded, updates=(dataclasses.replace(recorded.updates[0], weights=weights),))
    replay(run, load_zoo()["grpo"]())
    with pytest.raises(UserError, match="the correction has one weight per token, but fspo has one objective per response"):
        replay(run, load_zoo()["fspo"]())


def test_a_rule_whose_ratio_is_to_the_sampler_is_not_corrected_again(recorded):
    update = recorded.updates[0]
    halves = dataclasses.replace(update, weights=torch.full_like(update.inputs.advantages, 0.5))
    plain, halved = (dataclasses.replace(recorded, updates=(one,)) for one in (update, halves))
    for clip, factor in (("dppo-tv", 1.0), ("grpo", 0.5)):
        masses = [replay(run, load_zoo()[clip]()).table.gradient_mass for run in (plain, halved)]
        torch.testing.assert_close(masses[1], factor * masses[0])


@pytest.mark.parametrize("clip", few(["clip-cov", "grpo"]))  # per token; and one that draws at random with the step's seed
def test_replaying_a_rule_of_another_scope_gives_the_metrics_it_logged(tmp_path, clip):
    trained = quick_run(tmp_path / clip, clip, "clip.clip_low=0.01", "clip.clip_high=0.01", steps=2)
    run = RecordedRun.read(trained.path)
    for step, profile in by_step(run, run.own_rule).items():
        assert profile.clip_fraction == pytest.approx(trained.metrics[step]["clip/fraction"], rel=1e-4)
        assert profile.clip_fraction > 0


@pytest.mark.long
def test_a_replayed_adaptive_rule_ends_in_the_state_of_the_run(trained_adaptive):
    run = RecordedRun.read(trained_adaptive.path)
    last = replay(run, run.own_rule).states[-1]
    saved = json.loads((trained_adaptive.path / "checkpoints" / "step-000004" / "clip.json").read_text())
    del saved["name"]
    for name, value in last.model_dump().items():
        if isinstance(value, float | tuple):
            assert value == pytest.approx(saved[name], rel=1e-3, abs=1e-6), name
        else:
            assert value == saved[name], name
    assert last.lengths


def test_an_adaptive_rule_is_judged_by_bands_from_earlier_updates_only(recorded):
    policy = load_zoo()["fspo-adaptive"]()
    whole = replay(recorded, policy)
    assert whole.states[0] == policy
    decided = [state(update.inputs).clipped[:, 0] for state, update in zip(whole.states, recorded.updates, strict=False)]
    assert torch.equal(torch.cat(decided).float(), whole.table.clipped)
    for cut in (1, 5, 9):
        begun = replay(dataclasses.replace(recorded, updates=recorded.updates[: cut + 1]), policy)
        assert begun.states == whole.states[: cut + 2]


def with_needs(run, policy):
    """Return a recorded run with the policy's needs, as if its own rule had needed them."""
    updates = (dataclasses.replace(update, inputs=filled(policy, update.inputs)) for update in run.updates)
    return dataclasses.replace(run, updates=tuple(updates))


@pytest.mark.parametrize("name", by_inputs(WIDE))
def test_every_rule_with_a_width_is_matched(recorded, name):
    policy = load_zoo()[name](**DENSE.get(name, {}))
    recorded = with_needs(recorded, policy)
    policy = match_clip_fraction(recorded, policy, 0.1)
    found = replay(recorded, policy).profile.clip_fraction
    assert found == pytest.approx(clip_fraction(recorded, policy), abs=1e-6)
    adaptive = name == "fspo-adaptive"  # the rule targets the share itself, and 16 updates are few to reach it
    assert found == pytest.approx(0.1, abs=0.1 if adaptive else 0.01)


def test_a_rule_that_cannot_reach_the_share_is_reported(recorded):
    with pytest.raises(UserError, match="'gpg' has no width"):
        match_clip_fraction(recorded, load_zoo()["gpg"](), 0.1)
    # the first of four updates has ratio 1, so at most about three quarters are clipped
    with pytest.raises(UserError, match=r"no width makes rule 'fspo' clip a share of 0.89 of these responses \(possible: "):
        match_clip_fraction(recorded, load_zoo()["fspo"](), 0.89)


def test_skipped_steps_are_left_out_of_the_report_but_not_of_the_adaptation(recorded):
    policy = load_zoo()["fspo-adaptive"]()
    whole, late = replay(recorded, policy), replay(recorded, policy, skip_steps=2)
    assert late.states == whole.states
    assert len(late.table.length) == len(whole.table.length) // 2
    for nothing_left in (
        lambda: replay(recorded, policy, skip_steps=4),
        lambda: clip_fraction(recorded, load_zoo()["fspo"](), 4),
    ):
        with pytest.raises(UserError, match="no response with tokens and a nonzero advantage after step 4"):
            nothing_left()


@pytest.mark.long
def test_a_sequence_rule_cannot_read_advantages_per_token(tmp_path):
    settings = ["reward.kl_coef=0.1", "clip.advantage=batch_norm"]
    run = RecordedRun.read(quick_run(tmp_path / "run", "grpo", *settings, steps=1).path)
    assert run.updates[0].inputs.advantages.shape == run.updates[0].inputs.log_probs.shape
    replay(run, load_zoo()["grpo"]())
    with pytest.raises(UserError, match="has per-token advantages, but fspo needs one per response"):
        replay(run, load_zoo()["fspo"]())


def test_a_folder_without_a_run_is_refused(tmp_path, trained):
    with pytest.raises(UserError, match="is neither a run directory nor a folder with rollout files"):
        RecordedRun.read(tmp_path)
    (tmp_path / "config.yaml").write_text((trained.path / "config.yaml").read_text())
    with pytest.raises(UserError, match="has no recorded rollouts"):
        RecordedRun.read(tmp_path)


def test_recorded_rows_keep_their_layout(recorded):
    update = recorded.updates[0]
    lengths = update.inputs.response_mask.sum(-1)
    assert [
        len(sequence) > length
        for sequence, length in zip((update.batch.sequences[row] for row in update.rows), lengths.tolist(), strict=True)
    ]
    assert bool((update.inputs.log_probs[update.inputs.response_mask] <= 0).all())
    # before its first update, the model is the one that sampled
    torch.testing.assert_close(update.inputs.log_probs, update.inputs.old_log_probs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["fspo", "gspo", "grpo", "rloo"])
def test_matching_by_sign_clips_the_share_for_both_signs_and_keeps_all_rows(recorded, name):
    policy, target = load_zoo()[name](), 0.2
    matched = replay_matched(recorded, policy, target, by_sign=True)
    rows, whole = matched.table.judged(), replay(recorded, policy).table.judged()
    assert sorted(rows.length.tolist()) == sorted(whole.length.tolist())
    for sign, judge in ((-1, matched.policy), (1, matched.above.policy)):
        side = rows.advantage * sign > 0
        # the share of few responses is a step function; that of tokens is nearly continuous
        assert float(rows.clipped[side].mean()) == pytest.approx(target, abs=max(0.02, 1.5 / float(side.sum())))
        alone = replay(recorded, judge).table.judged()  # the side has the same decisions as the rule with these widths
        of_side = alone.advantage * sign > 0
        assert sorted(rows.clipped[side].tolist()) == sorted(alone.clipped[of_side].tolist())


def test_an_adaptive_rule_is_matched_by_sign_unchanged(recorded):
    policy = load_zoo()["fspo-adaptive"]()
    matched = replay_matched(recorded, policy, 0.3, by_sign=True)
    assert matched.above is None
    assert torch.equal(matched.table.clipped, replay(recorded, policy.targeting(0.3)).table.clipped)


def test_a_rule_that_never_clips_one_sign_is_refused_with_that_sign(recorded):
    with pytest.raises(
        UserError, match=r"for A < 0: no width makes rule 'cispo' clip a share of .* of these responses \(possible: 0 to 0\)"
    ):
        replay_matched(recorded, load_zoo()["cispo"](), 0.2, by_sign=True)
