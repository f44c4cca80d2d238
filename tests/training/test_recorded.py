"""Training on recorded rollouts: a run takes its batches from rollout files, and differs in nothing else."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import rlzoo
from rlzoo import RunConfig, UserError
from rlzoo.gate.settings import Start, check_settings, remarks
from rlzoo.gate.tokens import Asked, check_tokens
from rlzoo.journal.recorded import groups_of
from rlzoo.journal.rollout_file import RolloutFile, UpdateLogProbs
from rlzoo.lab.recorded import RecordedRun
from rlzoo.lab.replay import replay
from rlzoo.learner.batch import collate
from rlzoo.models.pretrained import load_pretrained
from rlzoo.tasks.problem import Problem
from tests.training.short import lines, resumes_after, without_times

STEPS = 3
COMMON = ["tracking.mlflow=false", "eval.num_problems=0", "learner.lr=1e-3"]
SAMPLING = ["rollout.num_prompts=8", "rollout.group_size=4", "rollout.max_new_tokens=60"]
DATA = ("token_ids", "sequence_lengths", "response_mask", "group_ids", "rewards", "turn_ids", "rollout_log_probs", "advantages")


def composed(recording, *overrides, clip="grpo", steps=STEPS, output=None):
    engine = ["rollout.engine=recorded", f"rollout.recorded={recording}"]
    return RunConfig.compose(clip=clip, overrides=[*engine, *COMMON, *overrides], steps=steps, output=output)


def weights(run, step=STEPS):
    return load_file(run / "checkpoints" / f"step-{step:06d}" / "model.safetensors")


def differing(first, second):
    """Return the names of the tensors that are not equal, bit for bit."""
    names = first.keys() | second.keys()
    return [name for name in names if name not in first or name not in second or not torch.equal(first[name], second[name])]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded") / "original"
    overrides = [*SAMPLING, *COMMON, "rollout.top_p=0.95", "checkpoint.every=1", "checkpoint.keep=9"]
    rlzoo.train(RunConfig.compose(clip="grpo", overrides=overrides, steps=STEPS, output=folder))
    return folder


@pytest.fixture(scope="module")
def other_rule(original):
    """A run with another rule on the same batches."""
    rlzoo.train(composed(original, "checkpoint.every=1", "checkpoint.keep=9", clip="gspo", output=original.with_name("gspo")))
    return original.with_name("gspo")


def test_a_run_on_its_own_rollouts_is_the_run_itself(original, tmp_path):
    """With the same rule and start model, every update is the recorded one, to the last bit and at its absolute size."""
    again = rlzoo.train(composed(original, "correction=none", output=tmp_path / "again"))
    first, second = (lines(run / "metrics.jsonl") for run in (original, again.path))
    assert first[1]["learner/grad_norm"] > 0.01, "the test needs a gradient"
    assert without_times(second) == without_times(first)
    assert not differing(weights(again.path), weights(original))
    for step in range(1, STEPS + 1):
        files = [load_file(run / "rollouts" / f"{step:06d}.safetensors") for run in (original, again.path)]
        assert files[0].pop("policy_versions") is not None  # the versions are those of the other run
        assert not differing(*files)


def test_the_usual_correction_leaves_the_first_update_as_it_was(original, tmp_path):
    assert composed(original).correction.name == "tis"
    run = rlzoo.train(composed(original, steps=1, output=tmp_path / "run"))
    expected, row = lines(original / "metrics.jsonl")[1], lines(run.path / "metrics.jsonl")[1]
    assert row["learner/grad_norm"] == pytest.approx(expected["learner/grad_norm"], rel=1e-4)
    for name, weight in weights(original, 1).items():
        torch.testing.assert_close(weights(run.path, 1)[name], weight, rtol=0, atol=5e-5)  # AdamW's steps have size lr = 1e-3


def test_two_rules_train_on_equal_batches(original, other_rule):
    for step in range(1, STEPS + 1):
        first, second = (load_file(run / "rollouts" / f"{step:06d}.safetensors") for run in (original, other_rule))
        for name in (*DATA, "kept_ids", "kept_sizes"):
            assert torch.equal(first[name], second[name]), name
        assert torch.equal(first["old_log_probs"], second["old_log_probs"]) == (step == 1), "the models differ after step 1"


def test_the_drift_is_measured_against_the_recorded_sampler(original, other_rule):
    rows, sizes = lines(other_rule / "metrics.jsonl"), []
    for step in range(1, STEPS + 1):
        recorded = load_file(original / "rollouts" / f"{step:06d}.safetensors")["rollout_log_probs"].double()
        now = load_file(other_rule / "rollouts" / f"{step:06d}.safetensors")["old_log_probs"].double()
        assert rows[step]["mismatch/kl"] == pytest.approx(float((recorded - now).mean()), rel=1e-5, abs=1e-9)
        sizes.append(float((recorded - now).abs().mean()))
        assert rows[step]["mismatch/log_ratio_abs_mean"] == pytest.approx(sizes[-1], rel=1e-5)
    assert sizes[0] < 1e-5 < 1e-3 < sizes[-1]


@pytest.mark.long
def test_packed_rows_take_the_recorded_steps_and_replay_gives_the_logged_metrics(original, other_rule, tmp_path):
    """The same two steps with packed rows; and a replay of the run's own rule on what the run wrote, step by step."""
    packed = rlzoo.train(composed(original, "learner.packing=true", clip="gspo", steps=2, output=tmp_path / "run"))
    start = load_pretrained("embedded")[0].state_dict()
    for name, weight in weights(other_rule, 2).items():
        moved = (weight - start[name]).norm()
        assert float((weights(packed.path, 2)[name] - weight).norm() / moved) < 0.01, name
    run = RecordedRun.read(packed.path)
    for step in (1, 2):
        updates = tuple(update for update in run.updates if update.step == step)
        again, logged = replay(replace(run, updates=updates), run.own_rule).profile.metrics(), packed.metrics[step]
        assert again["clip/fraction"] == pytest.approx(logged["clip/fraction"], rel=2e-4)
        assert again["fairness/ess"] == pytest.approx(logged["fairness/ess"], rel=2e-4)
    assert again["clip/fraction"] > 0, "the test needs clipped responses"


@pytest.mark.long
def test_a_large_drift_neither_ends_nor_warns(original, tmp_path, caplog):
    run = rlzoo.train(composed(original, "learner.lr=3e-2", output=tmp_path / "run"))
    assert lines(run.path / "metrics.jsonl")[-1]["mismatch/log_ratio_abs_mean"] > 0.1, "the test needs a drift"
    assert "mismatch" not in json.loads((run.path / "summary.json").read_text())["warnings"]


def foreign(original, folder, **changes):
    """Write the batches as another trainer might, under names that are not in the order of the steps."""
    folder.mkdir()
    for number, file in enumerate(sorted((original / "rollouts").glob("*.safetensors"))):
        step = RolloutFile.load(file)
        replace(step, step=7 * number, num_steps=None, rule={}, model="", writer="x", updates=(), **changes).save(
            folder / f"{9 - number}.safetensors"
        )
    return folder


@pytest.mark.long
def test_order_and_content_come_from_the_files(original, other_rule, tmp_path):
    """Steps are in order of the metadata, twice; recorded scores, advantages and log-probs of updates are not used."""
    folder = tmp_path / "dump"
    folder.mkdir()
    for place, file in enumerate(sorted((original / "rollouts").glob("*.safetensors"))):
        step = RolloutFile.load(file)
        wrong = torch.full_like(step.rollout_log_probs, -7.0)
        everything = UpdateLogProbs(torch.arange(len(step)), wrong)
        scores = {"advantages": torch.full((len(step),), 5.0), "old_log_probs": wrong, "ref_log_probs": wrong}
        step = replace(step, step=7 * place, rule={}, model="", updates=(everything,), **scores)
        step.save(folder / f"{9 - place}.safetensors")
    overrides = ["rollout.recorded_epochs=2", "checkpoint.every=1", "checkpoint.keep=9", f"steps={STEPS + 1}"]
    run = rlzoo.train(composed(folder, *overrides, clip="gspo", steps=None, output=tmp_path / "run"))
    assert not differing(weights(run.path), weights(other_rule))
    first, again = (load_file(run.path / "rollouts" / f"{step:06d}.safetensors") for step in (1, STEPS + 1))
    assert all(torch.equal(first[name], again[name]) for name in DATA)
    state = json.loads((run.path / "checkpoints" / f"step-{STEPS + 1:06d}" / "state" / "state.json").read_text())
    assert state["next_problem"] == STEPS + 1


@pytest.mark.long
def test_a_killed_run_resumes_bit_for_bit_and_only_with_the_same_files(original, other_rule, tmp_path):
    recording, output = tmp_path / "copy", tmp_path / "run"
    shutil.copytree(original, recording)
    config = composed(recording, "checkpoint.every=1", "checkpoint.keep=9", clip="gspo", output=output)
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    code = """
import os, signal, sys, rlzoo
def kill(step, row):
    if step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
rlzoo.train(rlzoo.RunConfig.compose([sys.argv[1]]), kill)
"""
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path / "config.yaml")], env={**os.environ}, check=False)
    assert killed.returncode == -signal.SIGKILL
    file = recording / "rollouts" / "000003.safetensors"
    content = file.read_bytes()
    replace(RolloutFile.load(file), seed=12345).save(file)
    with pytest.raises(
        UserError, match=r"^--resume: file .*/rollouts/000003\.safetensors has changed since the run started; .*"
    ):
        rlzoo.train(config, resume=True)
    file.write_bytes(content)
    with resumes_after(1, output):
        rlzoo.train(config, resume=True)
    assert not differing(weights(output), weights(other_rule))
    rows = (without_times(lines(run / "metrics.jsonl")) for run in (output, other_rule))
    assert next(rows) == next(rows)


@pytest.mark.long
def test_files_without_the_samplers_log_probs_or_ends_train_without_what_needs_them(original, tmp_path):
    folder = foreign(original, tmp_path / "dump", rollout_log_probs=None, finished=None)
    for overrides, clip, lacks in (
        ((), "grpo", "rollout_log_probs, which this run uses; record them, or set correction=none"),
        ((), "dppo-tv", "rollout_log_probs, which this run uses; record them"),
        (("correction=none", "reward.overlong_filtering=true"), "grpo", "finished, which this run uses; record them"),
    ):
        with pytest.raises(UserError, match=f"dump' lacks {lacks}$"):
            check_settings(composed(folder, *overrides, clip=clip), Start(1))
    run = rlzoo.train(composed(folder, "correction=none", output=tmp_path / "run"))
    assert not differing(weights(run.path), weights(original))
    row = lines(run.path / "metrics.jsonl")[1]
    assert not [name for name in row if name.startswith("mismatch/") or name == "response/truncated"]
    assert not {"rollout_log_probs", "finished"} & load_file(run.path / "rollouts" / "000001.safetensors").keys()


def test_a_rule_whose_ratio_is_to_the_sampler_is_not_corrected(original):
    config = composed(original, clip="dppo-tv")
    assert config.correction is None
    check_settings(config, Start(1))
    assert any(
        "the responses come from the recorded sampler; the ratio of dppo-tv is relative" in line for _, line in remarks(config)
    )


def test_settings_of_the_sampler_come_from_the_files(original):
    config = RunConfig.compose(clip="grpo", overrides=["rollout.engine=recorded", f"rollout.recorded={original}"], steps=2)
    settings = config.rollout
    assert (settings.num_prompts, settings.group_size, settings.max_new_tokens, settings.temperature) == (8, 4, 60, 1.0)
    assert RunConfig.model_validate(config.model_dump()).rollout == settings


REFUSED = {
    "rollout.num_prompts=9": "rollout.num_prompts=9: must be 8 for '.*'; remove the setting",
    "rollout.group_size=2": "rollout.group_size=2: must be 4 for '.*'; remove the setting",
    "rollout.temperature=0.5": "rollout.temperature=0.5: must be 1.0 for '.*'; remove the setting",
    "rollout.max_new_tokens=80": "rollout.max_new_tokens=80: must be 60 for '.*'; remove the setting",
    "rollout.top_k=1": "rollout.top_k=1: must be None for '.*'; remove the setting",
    "rollout.dynamic_sampling=2": "rollout.dynamic_sampling=2: must be 0 for '.*'; remove the setting",
    "rollout.max_staleness=1": "rollout.max_staleness=1: must be 0 for '.*'; remove the setting",
    "reward.overlong_buffer=0.2": "reward.overlong_buffer=0.2: recorded rewards already include any penalty; set it to 0",
    "steps=4": r"steps=4: '.*' has 3 steps \(rollout.recorded_epochs=1\); set steps to at most 3, or raise rollout.record",
    "rollout.recorded=nowhere": "'nowhere' does not exist; pass a run directory, rollout files, or a folder of rollout files",
    "rollout.recorded=null": "rollout.engine=recorded: set rollout.recorded to a run directory or a rollout file",
    "rollout.engine=hf": "rollout.recorded='.*' needs rollout.engine=recorded; set both",
}


@pytest.mark.parametrize("setting", REFUSED)
def test_what_contradicts_the_files_is_refused_in_one_line(original, setting):
    with pytest.raises(UserError) as refusal:
        check_settings(composed(original, setting, steps=None if setting.startswith("steps") else 2), Start(1))
    assert re.search(REFUSED[setting], str(refusal.value))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("change", ["step", "temperature", "rewards"])
def test_files_that_are_not_of_one_run_are_refused(original, tmp_path, change):
    folder = foreign(original, tmp_path / "dump", **({"rewards": None} if change == "rewards" else {}))
    odd = RolloutFile.load(folder / "9.safetensors")
    if change != "rewards":
        values = {"step": {"step": 7}, "temperature": {"temperature": 0.5}}[change]
        replace(odd, **values).save(folder / "9.safetensors")
    problem = {
        "step": "rollout.recorded='.*dump': two files are for step 7; use the files of a single run",
        "temperature": "rollout.recorded='.*dump': temperatures differ between the files; use the files of a single run",
        "rewards": "dump' lacks rewards, which this run uses; record them",
    }[change]
    with pytest.raises(UserError, match=problem):
        check_settings(composed(folder), Start(1))


def test_another_vocabulary_tokenizer_or_limit_and_answered_held_out_prompts_are_refused(original, tmp_path):
    model, tokenizer = load_pretrained("embedded")

    def admit(folder, prompts=()):
        config = composed(folder)
        return check_tokens(model, tokenizer, Asked(list(prompts)), named=config.model, rollout=config.rollout)

    recorded = RolloutFile.load(original / "rollouts" / "000001.safetensors")
    admitted = admit(original)
    assert admitted.longest == int(recorded.prompt_lengths.max())
    assert admitted.longest_row >= int(recorded.sequence_lengths.max())
    question = json.loads((original / "rollouts" / "000001.jsonl").read_text().splitlines()[0])["question"]
    prompt = composed(original).task.prompt(Problem(question, ""))
    with pytest.raises(UserError, match=r"answer the held-out prompt .*; set eval.num_problems=0, or choose a task"):
        admit(original, [prompt])
    ids = torch.where(recorded.token_ids == recorded.token_ids.max(), 4096, recorded.token_ids)
    changes = {
        r"have a token_id of 4096, but model 'embedded' allows at most \d+; set model.path": {
            "token_ids": ids,
            "kept_ids": None,
            "kept_sizes": None,
        },
        "are from model 'embedded-guess', but model 'embedded' has another tokenizer; set model.path": {
            "model": "embedded-guess"
        },
    }
    for number, (problem, values) in enumerate(changes.items()):
        replace(recorded, **values, updates=()).save(tmp_path / f"{number}.safetensors")
        with pytest.raises(UserError, match=problem):
            admit(tmp_path / f"{number}.safetensors")


def test_ragged_groups_turns_and_kept_tokens_become_the_batch_that_they_were():
    """Three responses by hand: groups alternate, one has two turns around an observation, one has no grade."""
    step = RolloutFile(
        step=5,
        token_ids=torch.tensor([1, 10, 11, 2, 3, 20, 90, 91, 21, 22, 1, 12]),
        sequence_lengths=torch.tensor([3, 7, 2]),
        response_mask=torch.tensor([0, 1, 1, 0, 0, 1, 0, 0, 1, 1, 0, 1]).bool(),
        group_ids=torch.tensor([4, 2, 4]),
        rewards=torch.tensor([1.0, 0.25, torch.nan]),
        rollout_log_probs=torch.tensor([-0.1, -0.2, -0.3, -0.4, -0.5, -0.6]),
        finished=torch.tensor([True, False, True]),
        kept_ids=torch.tensor([10, 5, 20, 22, 6], dtype=torch.int32),
        kept_sizes=torch.tensor([2, 0, 1, 0, 2, 0], dtype=torch.int32),
    )
    step.check()
    groups = groups_of(step, lambda ids: " ".join(map(str, ids)))
    assert [(group.problem, len(group.rollouts)) for group in groups] == [(Problem("1", ""), 2), (Problem("2 3", ""), 1)]
    batch = collate(groups, 1)
    assert [row.tolist() for row in batch.sequences] == [[1, 10, 11], [1, 12], [2, 3, 20, 90, 91, 21, 22]]
    assert batch.prompt_lengths.tolist() == [1, 1, 2]
    assert batch.turn_ids.tolist() == [[0, 0, -1, -1, -1], [0, -1, -1, -1, -1], [0, -1, -1, 1, 1]]
    expected = torch.tensor([[-0.1, -0.2, 0, 0, 0], [-0.6, 0, 0, 0, 0], [-0.3, 0, 0, -0.4, -0.5]])
    assert torch.equal(batch.rollout_log_probs, expected)
    assert batch.rewards.nan_to_num(nan=-1).tolist() == [1.0, -1.0, 0.25]
    assert (batch.group_ids.tolist(), batch.finished.tolist()) == ([0, 0, 1], [True, True, False])
    assert (batch.kept.ids.tolist(), batch.kept.sizes.tolist()) == ([10, 5, 20, 22, 6], [2, 0, 0, 1, 0, 2])
    assert batch.turn_rewards is None, "the rewards of single turns are not recorded"
    assert batch.state_ids is None
    assert groups[1].rollouts[0].transcript.splitlines() == ["environment: ", "model: 20", "environment: 90 91", "model: 21 22"]
