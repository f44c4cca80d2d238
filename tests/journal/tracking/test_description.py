"""The description of a run in MLflow, and the command in it."""

import shlex
import sys
from pathlib import Path

import pytest

from rlzoo.journal.tracking.description import COMMAND, describe_run, redact_words, typed_command

RUN = Path("/runs/mine")


def test_a_description_has_the_commands_that_resume_and_replay_the_run():
    text = describe_run("gspo on arithmetic", RUN)
    assert text.startswith("gspo on arithmetic\n")
    assert "rlzoo train --resume --output /runs/mine" in text
    assert "rlzoo replay /runs/mine --clip" in text


def test_a_long_command_is_truncated_to_the_limit_of_mlflow(monkeypatch):
    monkeypatch.setenv(COMMAND, "rlzoo " + "c" * 9000)
    assert len(describe_run("a", RUN)) < 8000


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["/env/bin/rlzoo", "train", "--clip", "fspo"], "rlzoo train --clip fspo"),
        (["/lib/rlzoo/__main__.py", "eval", "runs/a b"], "rlzoo eval 'runs/a b'"),
        (["race.py", "--fast"], "python race.py --fast"),
        (["-c", "one"], "python one"),
        ([""], "python"),
    ],
)  # fmt: skip
def test_the_command_is_recorded_as_typed(monkeypatch, argv, command):
    monkeypatch.delenv(COMMAND, raising=False)
    monkeypatch.setattr(sys, "argv", argv)
    assert typed_command() == command


def test_launched_processes_record_the_command_of_the_launcher(monkeypatch):
    monkeypatch.setenv(COMMAND, "rlzoo train --processes 2")
    assert typed_command() == "rlzoo train --processes 2"


def test_secret_arguments_of_a_command_are_left_out():
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
    text = describe_run("fspo", folder)
    commands = [shlex.split(line) for line in text.splitlines() if line.startswith("    rlzoo ") and str(tmp_path) in line]
    assert [words[index] for words, index in zip(commands, (4, 2), strict=True)] == [str(folder), str(folder)]
