"""`rlzoo replay` on the command line: tables at 80 columns, JSON, a page, and clear errors."""

import json
import re
import shutil

import pytest


@pytest.fixture
def run(trained, tmp_path):
    """A copy of a run, because the report is written into it."""
    shutil.copytree(trained.path, tmp_path / "run")
    return tmp_path / "run"


def test_replay_prints_a_row_for_each_rule_and_writes_a_page(rlzoo, run):
    code, out, _ = rlzoo("replay", run, "--clip", "fspo,gspo,rloo,grpo", "--match-clip-fraction", "0.1")
    assert code == 0
    for name in ("fspo", "gspo", "rloo", "grpo"):
        (row,) = [line.split() for line in out.splitlines() if line.startswith(f"{name} ")][:1]
        assert float(row[1]) == pytest.approx(0.1, abs=0.01)
    page = (run / "replay.html").read_text()
    assert f"report {run / 'replay.html'}" in out
    assert "<script" not in page
    assert not re.search(r'(src|href)="(?!#)', page)  # nothing is fetched


def test_replay_as_json_has_everything_the_table_has(rlzoo, run):
    code, out, _ = rlzoo("replay", run, "--clip", "fspo,grpo", "--json")
    assert code == 0
    answer = json.loads(out)
    own, other = answer["rules"]
    assert (own["rule"], other["rule"]) == ("fspo", "grpo")
    assert own["settings"]["width_high"] == 0.015  # as configured for the run
    assert other["settings"]["clip_high"] == 0.2  # the published setting
    parts = own["profile"]["lre"]
    for part in ("conditional", "composition", "total"):
        worst = parts[part]["max"]
        assert worst["interval"][0] <= worst["corrected"] <= worst["value"] <= worst["interval"][1]
    assert not (run / "replay.html").exists()


def test_settings_of_the_rules_come_from_configs_and_overrides(rlzoo, run):
    _, out, _ = rlzoo("replay", run, "--clip", "gspo", "--config", "arithmetic", "--json")
    assert json.loads(out)["rules"][0]["settings"]["clip_high"] == 0.0022
    _, out, _ = rlzoo("replay", run, "--clip", "gspo", "--set", "clip.clip_high=0.005", "--json")
    assert json.loads(out)["rules"][0]["settings"]["clip_high"] == 0.005


def test_a_setting_that_a_replay_does_not_use_is_refused(refused, run):
    message = "a replay has only the settings of rules, such as clip.width_low"
    assert refused("replay", run, "--clip", "fspo", "--set", "clpi.width_low=0.1") == f"--set clpi: {message}"
    assert refused("replay", run / "rollouts", "--clip", "gspo", "--set", "learner.lr=1") == f"--set learner: {message}"
    for order in (["clip.width_low=0.1", "clip=grpo"], ["clip.name=grpo", "clip.width_low=0.1"]):
        settings = [word for override in order for word in ("--set", override)]
        told = refused("replay", run, "--clip", "fspo", *settings)
        assert told == "--set clip=grpo: --clip already sets clip to fspo; use only one of the two"


def test_differences_are_a_page_of_two_rules_at_the_same_clip_fraction(rlzoo, refused, run, tmp_path):
    page = tmp_path / "differences.html"
    matched = ("--match-clip-fraction", "0.2", "--match-by-sign", "--differences", page)
    message = "--differences compares two rules, but --clip 'fspo' names 1; use --clip A,B"
    assert refused("replay", run, "--clip", "fspo", *matched) == message
    code, out, _ = rlzoo("replay", run, "--clip", "fspo,grpo", *matched)
    assert code == 0
    assert "matched at 0.2 for each sign of the advantage" in page.read_text()
    for shown in (out, (run / "replay.html").read_text()):
        assert "Do not compare the length errors of rules that clip tokens or turns (grpo) with the others." in shown


@pytest.mark.long
def test_a_rule_that_cannot_be_matched_is_unchanged_and_the_reason_reported(rlzoo, run):
    code, out, _ = rlzoo("replay", run, "--clip", "fspo,gpg", "--match-clip-fraction", "0.1")
    assert code == 0
    assert "gpg: rule 'gpg' has no width that could be scaled to match a clip fraction" in out


@pytest.mark.long
def test_tables_fit_into_eighty_columns(rlzoo, run, monkeypatch, capfd):
    from rlzoo.cli.replay import replay

    monkeypatch.setenv("COLUMNS", "80")
    replay(run, "fspo-adaptive,fspo", match=0.1)
    lines = [
        line.removeprefix(f"report {run}")
        for line in capfd.readouterr().out.splitlines()
        if " recorded responses in " not in line
    ]
    assert max(map(len, lines)) <= 80


def test_replay_refuses_unreadable_input(refused, run, tmp_path):
    assert "is neither a run directory nor a folder with rollout files" in refused("replay", tmp_path, "--clip", "fspo")
    assert "unknown rule 'fsop'" in refused("replay", run, "--clip", "fsop")
    assert "expected comma-separated rules" in refused("replay", run, "--clip", ",")


@pytest.mark.long
def test_the_clip_fraction_is_matched_for_either_sign(rlzoo, run):
    code, out, _ = rlzoo("replay", run, "--clip", "fspo,gspo", "--match-clip-fraction", "0.2", "--match-by-sign")
    assert code == 0
    assert "every rule at a clip fraction of 0.2 for each sign of the advantage" in " ".join(out.split())
    for name in ("fspo", "gspo"):
        row = next(line.split() for line in out.splitlines() if line.startswith(f"{name} "))
        assert [float(value) for value in row[1:4]] == pytest.approx([0.2] * 3, abs=0.02)
        assert f"{name}: A < 0: " in out


@pytest.mark.long
def test_a_rule_that_misses_the_clip_fraction_is_named(rlzoo, run):
    code, out, _ = rlzoo("replay", run, "--clip", "fspo,fspo-adaptive", "--match-clip-fraction", "0.4")
    assert code == 0
    assert "every rule at a clip fraction of 0.4, except fspo-adaptive (0." in " ".join(out.split())
    row = next(line.split() for line in out.splitlines() if line.startswith("fspo-adaptive "))
    assert abs(float(row[1]) - 0.4) > 0.04
    assert f"fspo-adaptive: clips 0{row[1]}"[:26] in out
    assert " instead of 0.4; " in out


def test_matching_by_sign_needs_a_clip_fraction(rlzoo, run):
    code, _, err = rlzoo("replay", run, "--clip", "fspo", "--match-by-sign")
    assert code == 2
    assert "--match-by-sign needs a clip fraction to match; add --match-clip-fraction 0.1" in err
