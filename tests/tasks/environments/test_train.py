"""Runs on environments, from configuration to metrics: failures in an episode are counted and do not end a run."""

import logging
import re

import pytest
import torch

import rlzoo
from rlzoo import RunConfig, ops
from rlzoo.core.errors import RunError
from rlzoo.lab.recorded import RecordedRun
from rlzoo.lab.replay import replay
from rlzoo.measure.turns import TurnProfile
from tests.rules import few
from tests.training.short import lines

GAME = "tests.tasks.environments.games"
SMALL = [
    "rollout.num_prompts=12",
    "rollout.group_size=2",
    "rollout.max_new_tokens=40",
    "eval.num_problems=0",
    "tracking.mlflow=false",
]


def config(output, game, *more, clip="fspo", steps=2):
    overrides = ["task.name=environment", f"task.environment={GAME}:{game}", *SMALL, *more]
    return RunConfig.compose(clip=clip, overrides=overrides, steps=steps, output=output)


@pytest.mark.long
def test_environments_that_raise_hang_or_flood_fail_their_episodes_and_are_reported(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="rlzoo"):
        result = rlzoo.train(config(tmp_path / "run", "Unruly", "task.timeout=0.5", "reward.max_failed=0.9"))
    rows = lines(tmp_path / "run" / "rollouts" / "000001.jsonl")
    failures = {row["failure"].partition(":")[0] for row in rows if "failure" in row}
    assert failures <= {"ValueError", "took longer than 0.5 s"}
    later = [row.get("failure") for row in lines(tmp_path / "run" / "rollouts" / "000002.jsonl")]
    assert "took longer than 0.5 s" in later
    reasons = [row["failure"] for row in rows if "failure" in row] + [reason for reason in later if reason]
    assert any(re.fullmatch(r"ValueError: no such move \(.*games\.py:\d+\)", reason) for reason in reasons)
    assert any("characters (at most 200,000)" in row["failure"] for row in rows if "failure" in row)
    failed = [row for row in rows if "failure" in row]
    assert result.metrics[1]["env/failed"] == pytest.approx(len(failed) / 24)
    assert 0 < len(failed) < 24
    assert all((row["reward"], row["finished"]) == (None, False) for row in failed)
    assert any(f"{len(failed)} of 24 environments failed" in record.message for record in caplog.records)
    assert result.metrics[2]["learner/skipped"] == 0


@pytest.mark.long
def test_text_that_cannot_be_encoded_fails_only_its_episode(tmp_path, caplog):
    result = rlzoo.train(config(tmp_path / "run", "Unspeakable", "task.workers=0", "reward.max_failed=0.9"))
    rows = lines(tmp_path / "run" / "rollouts" / "000001.jsonl")
    kinds = {index: ["", "", "reset returned 'what is", "step returned", "no text"][index % 5] for index in range(4, 12)}
    for row in rows:
        kind = kinds.get(int(row["question"].rpartition(":")[2]), "")
        assert kind in row.get("failure", "")
        assert bool(kind) == ("failure" in row)
    assert any("tokenizer has no token for 'w', 'h', 'a', 't', ' ', 'i', 's'" in row.get("failure", "") for row in rows)
    assert result.metrics[1]["env/failed"] == pytest.approx(sum("failure" in row for row in rows) / 24)
    assert len(result.metrics) == 3, "both steps were taken"


@pytest.mark.long
def test_a_reset_that_ignores_its_seed_is_reported_once(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="rlzoo"):
        rlzoo.train(config(tmp_path / "run", "Whimsical", "task.workers=0"))
    assert sum("must derive all randomness from its seed" in record.message for record in caplog.records) == 1


@pytest.mark.long
def test_too_many_failures_end_the_run(tmp_path):
    with pytest.raises(RunError, match=r"the environment failed for \d+ of 24 responses \(reward.max_failed=0.1\); the last "):
        rlzoo.train(config(tmp_path / "run", "Unruly", "task.timeout=0.5", "reward.max_failed=0.1"))


@pytest.mark.parametrize(("clip", "more"), few([("grpo", "gigpo"), ("turn-ratio", "process"), ("ctpo", "batch_norm")]))
def test_estimators_of_turns_and_tokens_train_on_episodes(tmp_path, clip, more):
    result = rlzoo.train(config(tmp_path / "run", "Chain", f"clip.advantage={more}", "task.workers=0", clip=clip))
    assert result.metrics[1]["env/turns_mean"] == 3
    assert result.metrics[1]["learner/grad_norm"] > 0
    row = lines(tmp_path / "run" / "rollouts" / "000001.jsonl")[0]
    assert len(row["turns"]) == 3
    assert row["reward"] == pytest.approx(sum(turn["reward"] for turn in row["turns"]))
    assert row["response"].startswith("environment: ")


def test_recorded_episodes_are_replayed_with_the_same_decisions(tmp_path):
    settings = ["task.workers=0", "learner.lr=1e-3", "learner.num_minibatches=1", "learner.num_epochs=2"]
    result = rlzoo.train(config(tmp_path / "run", "Chain", *settings, clip="grpo"))
    recorded = RecordedRun.read(tmp_path / "run")
    assert len(recorded.updates) == 4
    for step in (1, 2):
        shares = []
        for update in (each for each in recorded.updates if each.step == step):
            inputs = update.inputs
            assert (~inputs.response_mask[:, :8]).any(), "there are holes"
            assert torch.equal(inputs.response_mask, inputs.turn_ids >= 0)
            assert inputs.turn_ids.max() == 2
            share = ops.per_response(recorded.own_rule(inputs).clipped.float(), inputs.response_mask)
            shares.append(float(share[(inputs.advantages != 0).any(-1)].mean()))
        assert sum(shares) / 2 == pytest.approx(result.metrics[step]["clip/fraction"], abs=1e-5)


@pytest.mark.long
def test_a_replay_by_the_rule_of_the_run_has_its_metrics_by_turn(tmp_path):
    small = ["rollout.num_prompts=6", "eval.num_problems=0", "tracking.mlflow=false", "learner.lr=1e-3"]
    result = rlzoo.train(RunConfig.compose(["guess"], clip="fspo-turn", overrides=small, steps=1, output=tmp_path / "run"))
    recorded = RecordedRun.read(tmp_path / "run")
    found = TurnProfile.of(replay(recorded, recorded.own_rule).table).metrics()
    assert found["fairness/lre_turn_max"] > 0
    assert "clip/fraction_num_turns_bin_5" in found
    assert {name: result.metrics[1][name] for name in found} == pytest.approx(found, abs=1e-5)
