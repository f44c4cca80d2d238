"""Bad input: one clear line on stderr, exit code 2, no traceback, nothing written."""

import json

import pytest

GOOD_ROW = json.dumps({"question": "Ann has 3 pens and buys 4. How many has she?", "answer": "3 + 4 = 7\n#### 7"})

SETTINGS = {
    "learner.lrr=1": "unknown key 'learner.lrr'; did you mean 'learner.lr'?",
    "learner.zzz=1": "unknown key 'learner.zzz' (allowed: lr, schedule, ",
    "clip.width_hi=1": "unknown key 'clip.width_hi'; did you mean 'clip.width_high'?",
    "rolout.group_size=1": "unknown key 'rolout'; did you mean 'rollout'?",
    "learner.lr": "--set 'learner.lr': expected KEY=VALUE, such as learner.lr=1e-5",
    "clip.width_low=-1": "clip.width_low=-1: input should be greater than 0",
    "learner.lr=fast": "learner.lr='fast': input should be a valid number, unable to parse string as a number",
    "reward.overlong_buffer=1.5": "reward.overlong_buffer=1.5: input should be less than or equal to 1",
    "learner.num_minibatches=999": "learner.num_minibatches=999: more than the 256 responses in a step",
    "task.name=arithmetik": "unknown task 'arithmetik' (allowed: arithmetic, ",
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_an_invalid_setting_is_reported_with_the_allowed_values(refused, setting):
    assert refused("train", "--set", setting).startswith(SETTINGS[setting])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--clip", "fsop"], "unknown rule 'fsop'; did you mean 'fspo'?"),
        (["--clip", "zzz"], "unknown rule 'zzz'; see `rlzoo clips list`"),
        (["--steps", "0"], "steps=0: input should be greater than or equal to 1"),
        (["--config", "arithmetics"], "no config 'arithmetics'; did you mean 'arithmetic'?"),
        (["--config", "zzz"], "no config 'zzz' (a file, or one of: arithmetic, dapo, "),
        (
            ["--clip", "gspo", "--set", "clip.reduction=token_mean"],
            "clip: reduction 'token_mean' needs a per-token objective, but gspo has a per-response objective; use ",
        ),
        (
            ["--clip", "gspo", "--set", "reward.kl_coef=0.1"],
            "reward.kl_coef=0.1: a KL term in the reward makes advantages per-token, but gspo accepts only one advantage per "
            "response; use learner.kl_coef instead",
        ),
        (
            ["--clip", "grpo", "--set", "reward.kl_coef=0.1"],
            "reward.kl_coef=0.1: advantage 'group_norm' does not accept per-token rewards (allowed: batch_norm, raw); "
            "set clip.advantage=batch_norm",
        ),
        (
            ["--clip", "rloo", "--set", "rollout.group_size=1"],
            "rollout.group_size=1: advantage 'leave_one_out' compares the responses to one prompt and needs at least 2 of them",
        ),
    ],
)
def test_missing_or_incompatible_inputs_are_refused(refused, words, line):
    assert refused("train", *words).startswith(line)


def test_malformed_config_file(refused, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("steps: 3\nlearner: [1, 2\n")
    assert refused("train", "--config", file).startswith(f"config '{file}' is not valid YAML: line 3 ")
    file.write_text("just words")
    assert refused("train", "--config", file) == f"config '{file}' must contain keys and values such as 'steps: 40', not str"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (GOOD_ROW + "\n{not json\n", ["line 2"]),
        (json.dumps({"question": "1 + 1?", "solution_text": "2"}) + "\n", ["answer", "solution_text"]),
        ("", []),
        (None, []),
    ],
    ids=["a bad line", "no such column", "empty", "no such file"],
)
def test_an_unusable_data_file_is_reported_with_the_reason(refused, tmp_path, text, words):
    file = tmp_path / "questions.jsonl"
    if text is not None:
        file.write_text(text)
    line = refused("train", "--set", "task.name=math_file", "--set", f"task.path={file}")
    assert all(word in line for word in ["questions.jsonl", *words])


@pytest.mark.long
def test_output_directory_that_cannot_be_written(refused, tmp_path):
    (tmp_path / "file").write_text("in the way")
    line = refused("train", "--output", tmp_path / "file" / "run")
    assert line == f"output directory '{tmp_path / 'file' / 'run'}' cannot be written: Not a directory"


def test_missing_reward_function(refused):
    assert "no_such_module" in refused("train", "--set", "task.reward=no_such_module:grade")
