"""Bad input: one clear line on stderr, exit code 2, no traceback, nothing written."""

import json
import sys

import pytest

from rlzoo.cli.main import main

GOOD_ROW = json.dumps({"question": "Ann has 3 pens and buys 4. How many has she?", "answer": "3 + 4 = 7\n#### 7"})


@pytest.fixture
def refused(tmp_path, monkeypatch, capfd):
    """Run a command that must be rejected in an otherwise empty directory; returns its one-line error."""

    def run(*arguments):
        monkeypatch.chdir(tmp_path)
        before = sorted(tmp_path.rglob("*"))
        monkeypatch.setattr(sys, "argv", ["rlzoo", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capfd.readouterr()
        assert exit_.value.code == 2
        assert captured.out == ""
        assert captured.err.startswith("rlzoo: ")
        assert captured.err.count("\n") == 1, captured.err
        assert sorted(tmp_path.rglob("*")) == before
        return captured.err.removeprefix("rlzoo: ").strip()

    return run


def test_unknown_policy(refused):
    for word, advice in (("fsop", "; did you mean 'fspo'?"), ("zzz", "; see `rlzoo clips list`")):
        expected = f"unknown rule {word!r}{advice}"
        assert refused("train", "--clip", word) == expected
        assert refused("clips", "show", word) == expected


def test_unknown_key_names_the_closest(refused):
    assert refused("train", "--set", "learner.lrr=1") == "unknown key 'learner.lrr'; did you mean 'learner.lr'?"
    assert refused("train", "--set", "learner.zzz=1").startswith("unknown key 'learner.zzz' (allowed: lr, schedule, ")
    assert refused("train", "--set", "clip.width_hi=1").endswith("; did you mean 'clip.width_high'?")
    assert refused("train", "--set", "rolout.group_size=1").endswith("; did you mean 'rollout'?")


def test_override_without_a_value(refused):
    assert refused("train", "--set", "learner.lr") == "--set 'learner.lr': expected KEY=VALUE, such as learner.lr=1e-5"


def test_out_of_range_width(refused):
    assert refused("train", "--set", "clip.width_low=-1") == "clip.width_low=-1: input should be greater than 0"


def test_mistyped_value(refused):
    line = refused("train", "--set", "learner.lr=fast")
    assert line == "learner.lr='fast': input should be a valid number, unable to parse string as a number"


def test_group_of_one_with_leave_one_out(refused):
    assert refused("train", "--clip", "rloo", "--set", "rollout.group_size=1") == (
        "rollout.group_size=1: advantage 'leave_one_out' compares the responses to one prompt and needs at least 2 of them"
    )


def test_token_mean_with_a_sequence_policy(refused):
    assert refused("train", "--clip", "gspo", "--set", "clip.reduction=token_mean") == (
        "clip: reduction 'token_mean' needs a per-token objective, but gspo has a per-response objective; use 'sequence_mean'"
    )


def test_kl_in_the_reward_needs_advantages_by_token(refused):
    assert refused("train", "--clip", "gspo", "--set", "reward.kl_coef=0.1") == (
        "reward.kl_coef=0.1: a KL term in the reward makes advantages per-token, but gspo accepts only one advantage per "
        "response; use learner.kl_coef instead"
    )
    assert refused("train", "--clip", "grpo", "--set", "reward.kl_coef=0.1") == (
        "reward.kl_coef=0.1: advantage 'group_norm' does not accept per-token rewards (allowed: batch_norm, raw); "
        "set clip.advantage=batch_norm"
    )


def test_shaping_out_of_range(refused):
    line = refused("train", "--set", "reward.overlong_buffer=1.5")
    assert line == "reward.overlong_buffer=1.5: input should be less than or equal to 1"
    assert refused("train", "--set", "reward.overlong=1").endswith("; did you mean 'reward.overlong_buffer'?")
    one = ("--set", "rollout.group_size=1", "--set", "clip.advantage=raw")
    line = refused("train", *one, "--set", "rollout.dynamic_sampling=2")
    assert line == "rollout.dynamic_sampling=2: needs a rollout.group_size of at least 2"


def test_missing_config_file(refused):
    assert refused("train", "--config", "arithmetics") == "no config 'arithmetics'; did you mean 'arithmetic'?"
    assert refused("train", "--config", "zzz").startswith("no config 'zzz' (a file, or one of: arithmetic, dapo, ")


def test_malformed_config_file(refused, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("steps: 3\nlearner: [1, 2\n")
    assert refused("train", "--config", file).startswith(f"config '{file}' is not valid YAML: line 3 ")
    file.write_text("just words")
    assert refused("train", "--config", file) == f"config '{file}' must contain keys and values such as 'steps: 40', not str"


def math_run(file):
    return "train", "--set", "task.name=math_file", "--set", f"task.path={file}"


def test_data_file_with_a_bad_line(refused, tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text(GOOD_ROW + "\n{not json\n")
    line = refused(*math_run(file))
    assert "questions.jsonl" in line
    assert "line 2" in line


def test_data_file_without_the_column(refused, tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps({"question": "1 + 1?", "solution_text": "2"}) + "\n")
    line = refused(*math_run(file))
    assert "questions.jsonl" in line
    assert "answer" in line
    assert "solution_text" in line


def test_empty_data(refused, tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text("")
    assert "questions.jsonl" in refused(*math_run(file))


def test_missing_data_file(refused, tmp_path):
    assert "nothing.jsonl" in refused(*math_run(tmp_path / "nothing.jsonl"))


def test_unknown_task(refused):
    assert refused("train", "--set", "task.name=arithmetik").endswith("did you mean 'arithmetic'?")


def test_model_path_that_is_not_a_model(refused, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "config.json" in refused("train", "--set", f"model.path={tmp_path / 'empty'}")
    assert "smollm2" in refused("train", "--set", "model.path=smolm2")


def test_output_directory_of_another_run(refused, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text("steps: 1\n")
    line = refused("train", "--output", tmp_path / "mine")
    assert line == f"output directory '{tmp_path / 'mine'}' is not empty; choose another with --output, or remove this one"


def test_output_directory_that_cannot_be_written(refused, tmp_path):
    (tmp_path / "file").write_text("in the way")
    line = refused("train", "--output", tmp_path / "file" / "run")
    assert line == f"output directory '{tmp_path / 'file' / 'run'}' cannot be written: Not a directory"


def test_no_steps(refused):
    assert refused("train", "--steps", "0") == "steps=0: input should be greater than or equal to 1"


def test_more_minibatches_than_responses(refused):
    line = refused("train", "--set", "learner.num_minibatches=999")
    assert line == "learner.num_minibatches=999: more than the 256 responses in a step"


def test_reward_that_is_not_there(refused):
    assert "no_such_module" in refused("train", "--set", "task.reward=no_such_module:grade")


def test_a_current_directory_that_was_deleted_is_one_line(tmp_path, monkeypatch, capfd):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr("sys.argv", ["rlzoo", "train", "--dry-run"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    errors = capfd.readouterr().err
    assert errors.endswith("rlzoo: the current directory was deleted; change to another one\n")
    assert "Traceback" not in errors
