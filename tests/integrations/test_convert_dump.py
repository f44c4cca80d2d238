"""The example that converts another trainer's dump: every field, what is left out, and what is refused."""

import dataclasses
import sys

import pytest
import torch

from examples.convert_dump import main
from rlzoo import load_zoo
from rlzoo.journal.rollout_file import RolloutFile, UpdateLogProbs
from rlzoo.lab.recorded import RecordedRun
from rlzoo.lab.replay import replay
from tests.examples import nemo_rl_rows, write_dump


@pytest.fixture
def convert(tmp_path, monkeypatch):
    """Convert steps, by their number; returns the rollout files."""

    def run(steps, *options):
        for number, rows in steps.items():
            write_dump(tmp_path / "exp_001" / f"train_data_step{number}.jsonl", rows)
        output = tmp_path / "rollouts"
        monkeypatch.setattr(sys, "argv", ["convert_dump.py", str(tmp_path / "exp_001"), str(output), *options])
        main()
        return sorted(output.iterdir())

    return run


def test_every_field_of_a_dump_is_converted(convert):
    files = convert({10: nemo_rl_rows(), 9: nemo_rl_rows()}, "--temperature", "0.7")
    assert [file.name for file in files] == ["000009.safetensors", "000010.safetensors"]
    step = RolloutFile.load(files[0])
    assert (step.step, step.writer) == (9, "NeMo-RL")
    assert step.temperature == 0.7
    assert step.token_ids.tolist() == [7, 8, 3, 5, 4, 7, 8, 6, 9, 2, 1]
    assert step.sequence_lengths.tolist() == [5, 3, 3]
    assert step.prompt_lengths.tolist() == [2, 2, 1]
    assert step.response_mask.long().tolist() == [0, 0, 1, 0, 1, 0, 0, 1, 0, 1, 1]
    assert step.group_ids.tolist() == [0, 0, 1]
    assert step.rollout_log_probs.tolist() == [-1, -2, -3, -4, -5]
    assert step.old_log_probs.tolist() == [-1.5, -2.5, -3.5, -4.5, -5.5]
    assert (step.advantages.tolist(), step.rewards.tolist(), step.updates) == ([1, -1, 0.5], [1, 0, 2], ())


def test_a_converted_dump_with_an_update_is_replayed(convert):
    (file,) = convert({1: nemo_rl_rows()})
    step = RolloutFile.load(file)
    # one of two tokens is clipped in the first response: exp(0.5) > 1.2 at an advantage of 1; none at an advantage of -1
    log_probs = step.old_log_probs + torch.tensor([0.5, 0.0, 0.5, 0.0, 0.0])
    dataclasses.replace(step, updates=(UpdateLogProbs(torch.arange(3), log_probs),)).save(file)
    found = replay(RecordedRun.read(file.parent), load_zoo()["grpo"](clip_low=0.2, clip_high=0.2))
    assert found.profile.clip_fraction == pytest.approx(1 / 2 / 3)


def test_samples_and_tokens_without_a_loss_are_left_out(convert):
    first, second, third = nemo_rl_rows()
    second |= {"sample_loss_mask": [0.0], "generation_logprobs": [[0, 0, 9.0, 0, 0, 0]]}
    third |= {"token_loss_mask": [[0] * 6]}
    (file,) = convert({1: [first, second, third]})
    assert RolloutFile.load(file).rollout_log_probs.tolist() == [-1, -2]


def test_values_that_the_trainer_did_not_compute_are_missing(convert):
    rows = [row | {"prev_logprobs": [[0.0] * 6], "filtered_rewards": [0.25]} for row in nemo_rl_rows()]
    rows[0] |= {"advantages": [[0, 0, 1.0, 0, 2.0, 0]]}
    (file,) = convert({1: rows})
    step = RolloutFile.load(file)
    assert (step.old_log_probs, step.rewards.tolist()) == (None, [0.25, 0.25, 0.25])
    assert step.advantages.tolist() == [1, 2, -1, 0.5, 0.5]  # per token, because those of the first response differ


@pytest.mark.parametrize(
    ("replaced", "message"),
    [({"sample_loss_mask": [0]}, "no trained response"),
     ({"token_ids": [[7, 8, 3]]}, "expected sequence of length"),
     ({"generation_logprobs": [[None] * 6]}, "Could not infer dtype of NoneType"),
     ({"generation_logprobs": [[float("nan")] * 6]}, "rollout_log_probs has a value that is not finite"),
     ({"generation_logprobs": [[0.5] * 6]}, "rollout_log_probs contains 0.5, but a log-probability is at most 0"),
     ({"token_loss_mask": [[1, 0, 1, 0, 0, 0]]}, "response_mask is true on the first token"),
     ({"prev_logprobs": []}, "list index out of range")],
)  # fmt: skip
def test_a_dump_with_other_values_is_refused(replaced, message, convert, tmp_path, capsys):
    rows = nemo_rl_rows()
    rows = [row | replaced for row in rows] if "sample_loss_mask" in replaced else [*rows[:2], rows[2] | replaced]
    with pytest.raises(SystemExit, match="2"):
        convert({1: rows})
    *_, line = capsys.readouterr().err.splitlines()
    assert "train_data_step1.jsonl" in line
    assert message in line
    assert not [*(tmp_path / "rollouts").iterdir()]


def test_files_in_the_output_folder_are_kept(convert, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        convert({})
    assert "contains no train_data_step" in capsys.readouterr().err
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "000001.safetensors").write_text("mine")
    with pytest.raises(SystemExit, match="2"):
        convert({1: nemo_rl_rows()})
    assert "is not empty; choose another folder" in capsys.readouterr().err
    assert (tmp_path / "rollouts" / "000001.safetensors").read_text() == "mine"
