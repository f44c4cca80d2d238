"""Rollout files can be written and read back, torn or changed files are rejected, and any trainer's can be replayed."""

import dataclasses
import json
import math
import shutil

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import load_file, safe_open, save_file

from rlzoo import load_zoo
from rlzoo.core.errors import UserError
from rlzoo.journal.rollout_file import OPTIONAL, REQUIRED, RolloutFile, UpdateLogProbs
from rlzoo.lab.recorded import RecordedRun
from rlzoo.lab.replay import clip_fraction, replay

CHANGES = {
    "token_ids is missing": lambda tensors: tensors.pop("token_ids"),
    "group_ids has 1 values for": lambda tensors: tensors.update(group_ids=tensors["group_ids"][:1].clone()),
    "sequence_lengths has values outside the range 1 to": lambda tensors: tensors["sequence_lengths"].fill_(2**62),
    "sequence_lengths has a negative value": lambda tensors: tensors["sequence_lengths"].neg_(),
    "rows/0 names a response that does not exist": lambda tensors: tensors["rows/0"].add_(1000),
    "rows/0 names a response twice": lambda tensors: tensors["rows/0"].fill_(3),
    "log_probs/1 is missing": lambda tensors: tensors.pop("log_probs/1"),
    "log_probs/1 is not part of the format, or an earlier update is missing": lambda tensors: tensors.pop("rows/1"),
    "logprobs is not part of the format": lambda tensors: tensors.update(logprobs=torch.zeros(3)),
    "response_mask is true on the first token of a sequence": lambda tensors: tensors["response_mask"].fill_(True),
    "old_log_probs contains": lambda tensors: tensors["old_log_probs"].neg_(),
    "but a log-probability is at most 0": lambda tensors: tensors["log_probs/2"].exp_(),
    "turn_ids decreases within a response": lambda tensors: tensors["turn_ids"].copy_(
        -torch.arange(len(tensors["turn_ids"])) + 9999
    ),
    "turn_ids contains 4611686018427387904": lambda tensors: tensors["turn_ids"].fill_(2**62),
    "old_log_probs has a value that is not finite": lambda tensors: tensors["old_log_probs"].fill_(math.nan),
    "advantages has data type torch.float16, not torch.float32 or torch.float64": lambda tensors: tensors.update(
        advantages=tensors["advantages"].half()
    ),
    "response_mask has data type torch.float32, not torch.bool or torch.uint8": lambda tensors: tensors.update(
        response_mask=tensors["response_mask"].float()
    ),
}
METADATA = {
    "has no step": {"step": None},
    "step=1.5 is not a whole number of at least 0": {"step": 1.5},
    "temperature='x' is not a number above 0": {"temperature": "x"},
    "temperature=0 is not a number above 0": {"temperature": 0},
    "rule=3 is not a mapping with a rule's name": {"rule": 3},
    "writer=3 is not a string": {"writer": 3},
    "has the unknown key 'steps'": {"steps": 3},
    "has format version 3, but only versions 1 to 2 are supported": {"version": 3},
    "has format version None": {"version": None},
}


@pytest.fixture
def run(trained, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(trained.path, folder, ignore=shutil.ignore_patterns("checkpoints"))
    return folder


def content(file):
    with safe_open(file, "pt") as opened:
        return load_file(file), opened.metadata()


@pytest.mark.parametrize("problem", CHANGES)
def test_a_problem_with_a_file_is_reported(run, problem):
    file = run / "rollouts" / "000002.safetensors"
    tensors, metadata = content(file)
    CHANGES[problem](tensors)
    save_file(tensors, file, metadata)
    with pytest.raises(UserError) as refusal:
        RecordedRun.read(run)
    assert f"{str(file)!r} cannot be used as a rollout file: " in str(refusal.value)
    assert problem in str(refusal.value)


@pytest.mark.parametrize("problem", METADATA)
def test_a_problem_with_the_metadata_is_reported(run, problem):
    file = run / "rollouts" / "000002.safetensors"
    tensors, metadata = content(file)
    facts = json.loads(metadata["rlzoo_rollouts"]) | METADATA[problem]
    save_file(
        tensors, file, {"rlzoo_rollouts": json.dumps({name: value for name, value in facts.items() if value is not None})}
    )
    with pytest.raises(UserError, match="cannot be used as a rollout file") as refusal:
        RecordedRun.read(run)
    assert problem in str(refusal.value)


@pytest.mark.parametrize("text", [None, "", "[1]", "{", "3"])
def test_a_file_without_its_metadata_is_refused(run, text):
    file = run / "rollouts" / "000002.safetensors"
    tensors, _ = content(file)
    save_file(tensors, file, text if text is None else {"rlzoo_rollouts": text})
    what = (
        "is not a rollout file: its metadata has no 'rlzoo_rollouts'"
        if text is None
        else "cannot be used as a rollout file: metadata"
    )
    with pytest.raises(UserError, match=what):
        RecordedRun.read(run)


def test_equal_steps_give_equal_files(run, tmp_path):
    step = RolloutFile.load(run / "rollouts" / "000002.safetensors")
    for name in ("a", "b"):
        step.save(tmp_path / f"{name}.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_a_truncated_recording_is_refused(run):
    file = run / "rollouts" / "000002.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"000002.safetensors' cannot be read: .*; remove the file"):
        RecordedRun.read(run)


def test_a_run_with_a_corrupted_config_is_refused_by_name(run):
    (run / "config.yaml").write_text("clip: fspo\nlearner: 3\n")
    with pytest.raises(UserError, match=r"/run' has a config.yaml that is not a valid run configuration: learner=3"):
        RecordedRun.read(run, own_code=True)


def test_a_rollout_file_round_trips(run, tmp_path):
    step = RolloutFile.load(run / "rollouts" / "000002.safetensors")
    step.save(tmp_path / "again.safetensors")
    again = RolloutFile.load(tmp_path / "again.safetensors")
    for field in dataclasses.fields(RolloutFile):
        first, second = getattr(step, field.name), getattr(again, field.name)
        if isinstance(first, torch.Tensor):
            assert torch.equal(first, second), field.name
        elif field.name != "updates":
            assert first == second, field.name
    assert len(step.updates) == len(again.updates) > 1
    for first, second in zip(step.updates, again.updates, strict=True):
        assert torch.equal(first.rows, second.rows)
        assert torch.equal(first.log_probs, second.log_probs)


def test_replaying_the_files_of_a_run_equals_replaying_the_run(run, trained):
    """Outside their run directory, one by one or as a folder, the same files give the same numbers."""
    whole, files = RecordedRun.read(trained.path), sorted((run / "rollouts").glob("*.safetensors"))
    for paths in ([run / "rollouts"], files[::-1]):
        found = RecordedRun.read(paths)
        assert found.config is None
        assert found.own_rule == whole.own_rule
        assert (found.max_length, found.num_responses) == (whole.max_length, whole.num_responses)
        for name in ("fspo", "grpo", "gspo"):
            rule = load_zoo()[name]()
            assert repr(replay(found, rule).profile) == repr(replay(whole, rule).profile)  # NaN is not equal to itself
    with pytest.raises(UserError, match="two rollout files are for step"):
        RecordedRun.read([files[0], *files])
    other = dataclasses.replace(RolloutFile.load(files[-1]), rule={"name": "gspo"})
    other.save(run / "other.safetensors")
    mixed = RecordedRun.read([*files[:-1], run / "other.safetensors"])
    assert (mixed.rule, mixed.trained_with) == (None, "fspo, gspo")
    assert "was trained with several rules, fspo, gspo" in mixed.problem


def padded(chosen=None):
    """Return two prompts of 1 and 2 tokens, left-padded, with two responses each of 3, 1, 2 and 3 tokens."""
    present = torch.arange(3) < torch.tensor([3, 1, 2, 3])[:, None]
    rng = torch.Generator().manual_seed(0)
    old = -1 - torch.rand(4, 3, generator=rng)
    moved = old + torch.tensor([[0.5], [-0.5], [0.0], [0.1]])
    values = {"old_log_probs": old, "rewards": torch.tensor([1.0, 0.0, 0.0, 3.0])}
    updates = [(torch.tensor([3, 2]), old[[3, 2]]), (torch.tensor([0, 1]), moved[:2])]
    return RolloutFile.from_padded(
        7, torch.tensor([[0, 5], [0, 5], [6, 7], [6, 7]]), torch.tensor([[0, 1], [0, 1], [1, 1], [1, 1]]),
        torch.arange(10, 22).reshape(4, 3), present, torch.tensor([4, 4, 9, 9]), response_mask=chosen, updates=updates,
        **values,
    )  # fmt: skip


def test_padded_tensors_become_a_step():
    step = padded()
    assert step.token_ids.tolist() == [5, 10, 11, 12, 5, 13, 6, 7, 16, 17, 6, 7, 19, 20, 21]
    assert (step.lengths.tolist(), step.prompt_lengths.tolist()) == ([3, 1, 2, 3], [1, 1, 2, 2])
    assert [update.rows.tolist() for update in step.updates] == [[3, 2], [0, 1]]
    torch.testing.assert_close(step.updates[0].log_probs, torch.cat([step.old_log_probs[6:], step.old_log_probs[4:6]]))


def test_the_replay_of_a_file_worked_by_hand(tmp_path):
    """Sums of log-ratios 1.5, -0.5, 0, 0; advantages R - mean: .5, -.5, -1.5, 1.5; rloo's band is e^S in .8 to 1.2."""
    padded().save(tmp_path / "000007.safetensors")
    run = RecordedRun.read(tmp_path)
    assert [update.inputs.advantages[:, 0].tolist() for update in run.updates] == [[1.5, -1.5], [0.5, -0.5]]
    assert run.max_length == 3
    assert not run.splits_prompts
    rloo = load_zoo()["rloo"](clip_low=0.2, clip_high=0.2)
    assert replay(run, rloo).table.clipped.tolist() == [0.0, 0.0, 1.0, 1.0]
    with pytest.raises(UserError, match="no rule from the zoo was recorded"):
        _ = run.own_rule


def test_gaps_in_the_mask_begin_turns(tmp_path):
    chosen = torch.tensor([[1, 0, 1], [1, 1, 1], [1, 1, 1], [1, 1, 0]])
    padded(chosen).save(tmp_path / "000007.safetensors")
    first, second = RecordedRun.read(tmp_path).updates
    assert second.inputs.turn_ids.tolist() == [[0, -1, 1], [0, -1, -1]]
    assert first.inputs.turn_ids.tolist() == [[0, 0, -1], [0, 0, -1]]
    assert second.inputs.token_ids.tolist() == [[10, 0, 12], [13, 0, 0]]
    assert second.inputs.response_mask.sum(-1).tolist() == [2, 1]


def test_a_file_without_updates_or_old_log_probs_reports_how_to_compute_them(tmp_path):
    file, step = tmp_path / "000007.safetensors", padded()
    dataclasses.replace(step, updates=()).save(file)
    with pytest.raises(UserError, match="no recorded updates to replay; `rlzoo rescore` computes"):
        RecordedRun.read(file)
    dataclasses.replace(step, old_log_probs=None).save(file)
    with pytest.raises(UserError, match=r"step 7 in .* has no old_log_probs; `rlzoo rescore` computes them"):
        RecordedRun.read(file)
    dataclasses.replace(step, rewards=None).save(file)
    with pytest.raises(UserError, match="has neither advantages nor rewards"):
        RecordedRun.read(file)


def test_a_prompt_that_minibatches_split_is_detected(tmp_path):
    file, step = tmp_path / "000007.safetensors", padded()
    rows = [torch.tensor([0, 2]), torch.tensor([1, 3])]
    flat = torch.split(step.old_log_probs, step.lengths.tolist())
    updates = tuple(UpdateLogProbs(each, torch.cat([flat[row] for row in each.tolist()])) for each in rows)
    dataclasses.replace(step, updates=updates).save(file)
    assert RecordedRun.read(file).splits_prompts


def test_a_file_can_be_written_with_numpy_only(tmp_path):
    """With int32 IDs, a uint8 mask and float64 log-probs."""
    step = padded()
    tensors = {name: getattr(step, name).numpy() for name in (*REQUIRED, *OPTIONAL) if getattr(step, name) is not None}
    for index, update in enumerate(step.updates):
        tensors |= {
            f"rows/{index}": update.rows.numpy().astype(np.int32),
            f"log_probs/{index}": update.log_probs.double().numpy(),
        }
    tensors |= {"token_ids": tensors["token_ids"].astype(np.int32), "response_mask": tensors["response_mask"].astype(np.uint8)}
    save_numpy(tensors, tmp_path / "a.safetensors", {"rlzoo_rollouts": json.dumps({"version": 1, "step": 7})})
    again = RolloutFile.load(tmp_path / "a.safetensors")
    assert torch.equal(again.token_ids, step.token_ids)
    assert torch.equal(again.updates[1].log_probs, step.updates[1].log_probs)
    assert (again.temperature, again.max_length, again.rule, again.writer) == (1.0, None, {}, "")


def test_responses_without_tokens_and_a_step_0_are_not_counted(tmp_path):
    """The second of four responses with a nonzero advantage has no model token: rloo clips one of three."""
    chosen = torch.tensor([[1, 1, 1], [0, 0, 0], [1, 1, 1], [1, 1, 1]])
    step = dataclasses.replace(padded(chosen), step=0)
    step.save(tmp_path / "000000.safetensors")
    run = RecordedRun.read(tmp_path)
    rloo = load_zoo()["rloo"](clip_low=0.2, clip_high=0.2)
    profile = replay(run, rloo).profile
    assert profile.clip_fraction == pytest.approx(1 / 3)
    assert clip_fraction(run, rloo) == pytest.approx(1 / 3)
    assert sum(profile.both.count) == 3
