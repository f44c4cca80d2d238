"""A mistake on the command line is one line with a suggestion."""

import pytest


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["trian"], "no such command 'trian'. Did you mean 'train'?"),
        (["clips", "shwo"], "clips: no such command 'shwo'. Did you mean 'show'?"),
        (["--clip", "fspo"], "no option --clip; see `rlzoo --help`"),
        (["train", "--dryrun"], "train: no option --dryrun; did you mean '--dry-run'?"),
        (["train", "--model=X"], "train: no option --model; did you mean --set model.path=VALUE?"),
        (["train", "--lr", "1e-5"], "train: no option --lr; did you mean --set learner.lr=VALUE?"),
        (["train", "--batch-size", "4"], "train: no option --batch-size; did you mean --set rollout.num_prompts=VALUE?"),
        (["train", "--task", "gsm8k"], "train: no option --task; did you mean --set task.name=VALUE?"),
        (["compare", "runs", "--jsn"], "compare: no option --jsn; did you mean '--json'?"),
        (["compare", "runs", "--lr", "1"], "compare: no option --lr; see `rlzoo compare --help`"),
        (["sweep"], "sweep: missing option '--clip'; see `rlzoo sweep --help`"),
        (["clips", "show"], "clips show: missing argument 'NAME|PATH'; see `rlzoo clips show --help`"),
        (["train", "--clip"], "option '--clip' requires an argument; see `rlzoo --help`"),
        (["train", "fspo"], "train: got unexpected extra argument(s) (fspo); name rules with --clip and settings with --set"),
        (["doctor", "fspo"], "doctor: got unexpected extra argument(s) (fspo); see `rlzoo doctor --help`"),
    ],
)
def test_a_typing_error_is_reported_in_one_line_with_a_suggestion(refused, words, line):
    assert refused(*words) == line


def test_a_value_of_the_wrong_type_is_reported_in_one_line(refused):
    assert refused("train", "--steps", "many").startswith("train: invalid value for '--steps': ")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["train", "--clip", "FSPO"], "did you mean 'fspo'?"),
        (["train", "--clip", "ppo"], "did you mean 'grpo', which has PPO's clip?"),
        (["clips", "show", "ppo"], "did you mean 'grpo', which has PPO's clip?"),
        (["train", "--clip", "dapo"], "'dapo' is a config, not a rule: use --config dapo"),
        (["clips", "check", "dapo"], "'dapo' is a config, not a rule: use --config dapo"),
        (["train", "--clip", "gspo,fspo"], "compare several with: rlzoo sweep --clip gspo,fspo"),
        (["sweep", "--clip", "fspo", "--cpus", "2"], "on this machine, --jobs sets the number of runs at once"),
        (["train", "--set", "lr=1"], "did you mean 'learner.lr'?"),
        (["train", "--set", "learner.learning_rate=1"], "did you mean 'learner.lr'?"),
        (["train", "--set", "num_generations=4"], "did you mean 'rollout.group_size'?"),
        (["train", "--set", "reward=mine:short"], "to select a reward function, use task.reward=mine:short"),
    ],
)
def test_names_of_other_libraries_and_other_kinds_are_understood(refused, words, hint):
    assert refused(*words).endswith(hint)


def test_another_rule_is_refused_when_a_run_is_resumed(refused, trained):
    assert refused("train", "--resume", "--output", trained.path, "--clip", "gspo") == (
        "--resume: clip.name changed from 'fspo' to 'gspo'; undo this, pass --allow-changed to resume with the change, or "
        "start a new run with another --output"
    )


@pytest.mark.parametrize(
    "words", [("eval", "embedded", "--suite", "arithmetic"), ("sweep", "--clip", "fspo", "--seeds", "2"), ("compare", "runs")]
)
def test_commands_for_one_process_do_not_wait_for_others(refused, monkeypatch, words):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert refused(*words) == f"{words[0]} runs in one process, but the environment has WORLD_SIZE=4; unset it"


@pytest.mark.long
def test_home_is_expanded_in_every_path_on_the_command_line(rlzoo, refused, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.yaml").write_text("steps: 3\n")
    for words in (["--config=~/mine.yaml", "--output=~/run"], ["--config", "~/mine.yaml", "--set", "output=~/run"]):
        code, out, _ = rlzoo("train", *words, "--dry-run")
        assert (code, f"output: {tmp_path}/run\n" in out, "steps: 3\n" in out) == (0, True, True)
    assert f"{tmp_path}/none" in refused("compare", "~/none")
    assert "no such user" in refused("clips", "new", "my-rule", "--folder=~no-such-user/x")
