"""The description of a run in MLflow, and the command in it."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from rlzoo import ClipPolicy, RunConfig
from rlzoo.journal.tracking.description import COMMAND, describe_run, differences, redact_words, source_name, typed_command
from rlzoo.training.mlflow_run import description

RUN = Path("/runs/mine")


def table(text):
    """Return settings, defaults and this run's values from the list of differences."""
    found = re.findall(r'^    (\S+): "?(.*?)"? \(default: "?(.*?)"?\)$', text, re.MULTILINE)
    return {key: (there, here) for key, here, there in found}


def test_a_run_without_settings_has_no_differences():
    text = description(RunConfig.compose(clip="gspo"), RUN)
    assert text.startswith("**gspo** on arithmetic, model embedded, seed 0, 40 steps\n")
    assert "No differences from `rlzoo train --clip gspo`." in text
    assert table(text) == {}
    assert "rlzoo train --resume --output /runs/mine" in text
    assert "rlzoo replay /runs/mine --clip" in text


def test_what_differs_from_the_policys_own_run_is_listed():
    config = RunConfig.compose(clip="gspo", seed=3, overrides=["learner.lr=1e-5", "clip.dual_clip=3"], output="elsewhere")
    assert table(description(config, RUN)) == {
        "seed": ("0", "3"), "learner.lr": ("0.0003", "1e-05"), "clip.dual_clip": ("null", "3.0"),
    }  # fmt: skip


def test_a_config_is_compared_with_the_run_without_it():
    config = RunConfig.compose(["dapo"])
    different = table(description(config, RUN))
    assert different["clip.clip_high"] == ("0.2", "0.28")
    assert len(different) == len(differences({}, different))


def test_settings_of_another_task_have_no_default():
    different = differences({"task.name": "a", "task.operand_max": 9}, {"task.name": "b", "task.path": "c"})
    assert different == {"task.name": ("a", "b"), "task.path": ("-", "c")}


def test_a_policy_made_in_python_is_compared_with_the_shipped_run():
    class Own(ClipPolicy):
        """Follows the gradient."""

        name, paper, scope = "own", "none", "token"

        def __call__(self, inputs):
            raise NotImplementedError

    text = description(RunConfig.compose(clip="fspo").model_copy(update={"clip": Own()}), RUN)
    assert "Differences from `rlzoo train`:" in text
    assert table(text)["clip.name"][1] == "own"


def test_secrets_are_not_described():
    settings = ["clip.dual_clip=3", "rollout.vllm.server=http://me:hunter22@host:8000", "rollout.engine=vllm"]
    text = description(RunConfig.compose(clip="grpo", overrides=settings), RUN)
    assert "hunter22" not in text
    assert table(text)["rollout.vllm.server"] == ("null", "http://<redacted>@host:8000")


def test_a_long_description_is_cut_to_what_mlflow_takes(monkeypatch):
    monkeypatch.setenv(COMMAND, "rlzoo " + "c" * 9000)
    many = {f"section.setting_{number}": ("x" * 500, "`|\n" * 300) for number in range(200)}
    text = describe_run("a", "rlzoo train", many, RUN)
    assert len(text) < 8000
    assert text.endswith(" ...")
    shown = text.partition("Differences from `rlzoo train`:\n\n")[2].splitlines()
    assert all(line.startswith("    section.setting_") for line in shown), "a value ends no line"
    assert len(shown) > 1


@pytest.mark.parametrize(
    ("argv", "command", "source"),
    [
        (["/env/bin/rlzoo", "train", "--clip", "fspo"], "rlzoo train --clip fspo", "rlzoo train"),
        (["/lib/rlzoo/__main__.py", "eval", "runs/a b"], "rlzoo eval 'runs/a b'", "rlzoo eval"),
        (["race.py", "--fast"], "python race.py --fast", "race.py"),
        (["-c", "one"], "python one", "python one"),
        ([""], "python", "python"),
    ],
)  # fmt: skip
def test_the_command_is_the_one_that_was_typed(monkeypatch, argv, command, source):
    monkeypatch.delenv(COMMAND, raising=False)
    monkeypatch.setattr(sys, "argv", argv)
    assert typed_command() == command
    assert source_name() == source


def test_launched_processes_tell_the_launchers_command(monkeypatch):
    monkeypatch.setenv(COMMAND, "rlzoo train --processes 2")
    assert typed_command() == "rlzoo train --processes 2"


def test_words_of_a_command_that_are_secret_are_left_out():
    words = [
        "--set",
        "clip.api_key=two words",
        "judge={token: abc, name: x}",
        "learner.lr=1e-5",
        "--password",
        "abc",
        "--seed",
        "1",
    ]
    assert redact_words(words) == [
        "--set", "clip.api_key=<redacted>", "judge=<redacted>", "learner.lr=1e-5", "--password", "<redacted>", "--seed", "1",
    ]  # fmt: skip
    assert redact_words(["--output", "s3://me:hunter22@host/x"]) == ["--output", "<redacted>"]
    assert redact_words(["[unclosed", "a=[unclosed"]) == ["[unclosed", "a=[unclosed"]


def test_the_commands_of_a_description_can_be_copied(tmp_path):
    folder = tmp_path / "my  runs" / "it's one"
    text = description(RunConfig.compose(clip="fspo"), folder)
    commands = [shlex.split(line) for line in text.splitlines() if line.startswith("    rlzoo ") and str(tmp_path) in line]
    assert [words[index] for words, index in zip(commands, (4, 2, 3), strict=True)] == [
        str(folder), str(folder), str(folder / "config.yaml"),
    ]  # fmt: skip
