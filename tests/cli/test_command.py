"""Mistakes on the command line get a suggestion, and the shell completes names and settings."""

import pytest

from rlzoo.cli import complete


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["--model", "X"], "--set model.path=X"),
        (["--lr", "1e-5"], "--set learner.lr=1e-5"),
        (["--lr=1e-5"], "--set learner.lr=1e-5"),
        (["--batch-size", "4"], "--set rollout.num_prompts=4"),
        (["--task", "gsm8k"], "--set task.name=gsm8k"),
        (["--dryrun"], "'--dry-run'"),
        (["--model", "my model"], "--set 'model.path=my model'"),
    ],
)
def test_an_option_that_does_not_exist_is_answered_with_what_was_meant(refused, arguments, meant):
    line = refused("train", *arguments)
    assert line.startswith(f"train: no option {arguments[0].partition('=')[0]}; did you mean {meant}?")


def test_commands_without_settings_suggest_their_own_options(refused, tmp_path):
    assert refused("compare", tmp_path, "--jsn") == "compare: no option --jsn; did you mean '--json'?"
    assert refused("compare", tmp_path, "--lr", "1") == "compare: no option --lr; see --help"


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--clip", "FSPO"], "did you mean 'fspo'?"),
        (["--clip", "ppo"], "did you mean 'grpo', which has PPO's clip?"),
        (["--clip", "dapo"], "use --config dapo"),
        (["--clip", "gspo,fspo"], "compare several with: rlzoo sweep --clip gspo,fspo"),
        (["--set", "lr=1"], "did you mean 'learner.lr'?"),
        (["--set", "learner.learning_rate=1"], "did you mean 'learner.lr'?"),
        (["--set", "num_generations=4"], "did you mean 'rollout.group_size'?"),
    ],
)
def test_names_of_other_libraries_are_understood(refused, arguments, hint):
    assert refused("train", *arguments).endswith(hint)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["compare"],
            "compare: RUN is missing: run directories, or folders that contain them, such as runs/ or a sweep's folder",
        ),
        (["sweep"], "sweep: --clip is missing: comma-separated rules, such as fspo,gspo"),
        (["train", "--clip"], "train: --clip needs a value: rule to train with, such as fspo (see `rlzoo clips list`)"),
        (
            ["train", "--clip", "--quiet"],
            "train: --clip needs a value: rule to train with, such as fspo (see `rlzoo clips list`)",
        ),
        (["train", "fspo"], "train fspo: name the rule with --clip fspo"),
        (["sweep", "--clip", "fspo", "gspo", "grpo"], "sweep gspo: separate rules with commas: --clip fspo,gspo,grpo"),
        (["clips", "show", "ppo"], "there is no rule 'ppo'; did you mean 'grpo', which has PPO's clip?"),
        (["train", "dapo"], "train dapo: name a config with --config dapo"),
        (["train", "mine.py"], "train mine.py: name a plugin with --plugin mine.py"),
        (["train", "steps=3"], "train steps=3: change a setting with --set steps=3"),
        (["train", "anything"], "train anything: unexpected argument; name a rule with --clip NAME"),
        (["doctor", "fspo"], "doctor fspo: unexpected argument; see --help"),
        (["clips", "show"], "clips show: NAME|PATH is missing: a rule's name, or a plugin file or folder"),
        (["trian"], "no command trian; did you mean 'train'?"),
        (["clips", "shwo"], "clips: no command shwo; did you mean 'show'?"),
        (["--clip", "fspo"], "no such option before the command's name: --clip; see --help"),
        (
            ["clips", "show", "dapo"],
            "'dapo' is a config, not a rule: use --config dapo; to see its rule, run: rlzoo clips show grpo",
        ),
        (
            ["clips", "check", "dapo"],
            "'dapo' is a config, not a rule: use --config dapo; to see its rule, run: rlzoo clips show grpo",
        ),
        (
            ["train", "--set", "reward=mine:short"],
            "reward='mine:short': must be a section of settings; to select a reward function, use task.reward=mine:short",
        ),
    ],
)
def test_other_mistakes_are_answered_in_one_line(refused, words, line):
    assert refused(*words) == line


def test_a_value_of_the_wrong_type_is_answered_in_one_line(refused):
    assert refused("train", "--steps", "many").startswith("train: invalid value for '--steps': ")
    assert refused("ui", "--port", "0") == "ui: invalid value for '--port': input should be greater than or equal to 1"


def test_another_rule_is_refused_when_a_run_is_resumed(refused, trained):
    assert refused("train", "--resume", "--output", trained.path, "--clip", "gspo") == (
        "--resume: clip.name was 'fspo' and would be 'gspo'; undo this, pass --allow-changed to resume with the change, or "
        "start a new run with another --output"
    )


def test_the_suggestions_are_accepted(rlzoo):
    settings = ["learner.lr=1e-5", "rollout.num_prompts=4", "rollout.group_size=4", "model.path=embedded"]
    code, out, _ = rlzoo("train", "--dry-run", *(word for setting in settings for word in ("--set", setting)))
    assert code == 0
    assert "lr: 1.0e-05" in out


def test_the_shell_completes_policies_and_configs():
    assert complete.policies("fspo") == ["fspo", "fspo-adaptive", "fspo-turn"]
    assert "fspo,gspo" in complete.policies("fspo,gs")
    assert complete.configs("arith") == ["arithmetic"]


@pytest.mark.parametrize(
    "words",
    [
        ("eval", "embedded", "--suite", "arithmetic"),
        ("sweep", "--clip", "fspo", "--seeds", "2"),
        ("compare", "runs"),
        ("replay", "runs/one", "--clip", "grpo"),
        ("rescore", "runs/one", "--old", "embedded", "--output", "new"),
        ("calibrate", "--clip", "fspo"),
    ],
)
def test_commands_for_one_process_do_not_wait_for_others(refused, monkeypatch, words):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "1")
    line = refused(*words)
    assert line == f"{words[0]} runs in one process, but the environment has WORLD_SIZE=4; unset WORLD_SIZE, LOCAL_RANK"


def test_suggested_commands_are_quoted(refused):
    assert refused("train", "my rule.py").endswith("name a plugin with --plugin 'my rule.py'")
    assert refused("train", "my run.yaml").endswith("name a config with --config 'my run.yaml'")
    assert refused("train", "task.template=Q: {question}").endswith("--set 'task.template=Q: {question}'")


def test_home_is_expanded_in_every_path_on_the_command_line(rlzoo, refused, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.yaml").write_text("steps: 3\n")
    (tmp_path / "zero.json").write_text("{}")
    for words in (["--config=~/mine.yaml", "--output=~/run"], ["--config", "~/mine.yaml", "--set", "output=~/run"]):
        code, out, _ = rlzoo("train", *words, "--dry-run")
        assert (code, f"output: {tmp_path}/run\n" in out, "steps: 3\n" in out) == (0, True, True)
    code, out, _ = rlzoo("sweep", "--clip", "grpo", "--seeds", "1", "--output=~/race", "--config=~/mine.yaml", "--dry-run")
    assert (code, out) == (0, "grpo-0\n")
    for command in (["compare"], ["replay", "--clip", "fspo"], ["eval", "--suite", "arithmetic"], ["sync"]):
        assert f"{tmp_path}/none" in refused(*command, "~/none")
    assert "no such user" in refused("clips", "new", "my-rule", "--folder=~no-such-user/x")
    code, out, _ = rlzoo("clips", "new", "my-rule", "--folder=~/plugins")
    assert (code, (tmp_path / "plugins" / "rlzoo-my-rule").is_dir()) == (0, True)
