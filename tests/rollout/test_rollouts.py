"""Sampling one batch ahead: which weights sampled what, and that nothing else changes."""

import pytest
import torch

import rlzoo
from rlzoo.journal.rollout_file import RolloutFile
from rlzoo.models.pretrained import load_pretrained
from tests.off_policy import plain_log_probs
from tests.training.short import lines, quick, without_times


def run(folder, *overrides):
    return rlzoo.train(quick(folder, steps=3, overrides=["tracking.mlflow=false", *overrides]))


@pytest.fixture(scope="module")
def ahead(tmp_path_factory):
    return run(tmp_path_factory.mktemp("ahead") / "run", "rollout.max_staleness=1")


def recorded(result, step):
    return RolloutFile.load(result.path / "rollouts" / f"{step:06d}.safetensors")


def test_every_batch_but_the_first_is_one_step_old(ahead):
    # four optimizer steps each: step 2 trains on samples of the first weights, step 3 on samples of those after step 1
    versions = [{row["policy_version"] for row in lines(ahead.path / "rollouts" / f"{step:06d}.jsonl")} for step in (1, 2, 3)]
    assert versions == [{0}, {0}, {4}]
    assert [row["rollout/staleness"] for row in ahead.metrics[1:]] == [0.0, 4.0, 4.0]


def test_a_batch_was_sampled_with_the_recorded_policy_version(ahead):
    model, _ = load_pretrained("embedded")
    step = recorded(ahead, 2)
    sequences = step.token_ids.split(step.sequence_lengths.tolist())
    reported = step.rollout_log_probs.split(step.lengths.tolist())
    trainers = step.old_log_probs.split(step.lengths.tolist())
    with torch.no_grad():
        first = [plain_log_probs(model, ids, len(values)) for ids, values in zip(sequences, reported, strict=True)]
    torch.testing.assert_close(torch.cat(reported), torch.cat(first), atol=1e-4, rtol=0)
    assert float((torch.cat(reported) - torch.cat(trainers)).abs().max()) > 1e-3
    assert ahead.metrics[2]["mismatch/log_ratio_abs_max"] > 1e-3


def test_sampling_ahead_changes_only_batches_after_the_first(ahead, tmp_path):
    plain = run(tmp_path / "plain")
    assert torch.equal(recorded(plain, 1).token_ids, recorded(ahead, 1).token_ids)
    assert lines(plain.path / "rollouts" / "000002.jsonl")[0]["policy_version"] == 4
    assert not torch.equal(recorded(plain, 2).rollout_log_probs, recorded(ahead, 2).rollout_log_probs)
    assert "rollout/staleness" not in plain.metrics[1]


def test_a_run_one_batch_ahead_repeats(ahead, tmp_path):
    again = run(tmp_path / "again", "rollout.max_staleness=1")
    assert without_times(again.metrics) == without_times(ahead.metrics)
