"""`rlzoo compare` on the command line."""

import json
import re

import pytest

from tests.quick import quick_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    for clip in ("fspo", "rloo"):
        for seed in (0, 1):
            quick_run(folder / f"{clip}-{seed}", clip, "eval.num_problems=10", seed=seed, steps=2)
    return folder


@pytest.mark.long
def test_compare_prints_scores_and_pairs_and_writes_a_page(rlzoo, runs):
    code, out, _ = rlzoo("compare", runs)
    assert code == 0
    assert "score: held-out accuracy at the end" in out
    assert re.search(r"^fspo +2 ", out, re.MULTILINE)
    assert out.count("too few seeds: no winner is named with fewer than 5 common seeds") == 1
    page = (runs / "compare.html").read_text()
    for part in ("Scores", "Pairs", "By step", "By response length", "Time, memory and runs", "fspo-0"):
        assert part in page
    assert not re.search(r'(src|href)="(?!#)', page)


def test_compare_as_json_has_every_run(rlzoo, runs):
    code, out, _ = rlzoo("compare", runs / "fspo-0", runs / "fspo-1", runs / "rloo-0", "--json")
    assert code == 0
    answer = json.loads(out)
    by_label = {contender["label"]: contender for contender in answer["contenders"]}
    assert [run["seed"] for run in by_label["fspo"]["runs"]] == [0, 1]
    assert by_label["rloo"]["score"]["mean_interval"] is None
    assert answer["pairs"][0]["num_seeds"] == 1


@pytest.mark.long
def test_the_tables_fit_into_eighty_columns(runs, monkeypatch, capfd):
    from rlzoo.cli.compare import compare

    monkeypatch.setenv("COLUMNS", "80")
    compare([runs], report=runs / "page.html")
    lines = [line for line in capfd.readouterr().out.splitlines() if not line.startswith("report")]
    assert max(map(len, lines)) <= 80


@pytest.mark.long
def test_long_labels_are_numbered(runs, tmp_path, monkeypatch, capfd):
    from rlzoo.cli.compare import compare

    quick_run(tmp_path / "narrow", "fspo", "eval.num_problems=10", "clip.width_low=0.001", "clip.width_high=0.001", steps=2)
    monkeypatch.setenv("COLUMNS", "80")
    compare([runs / "fspo-0", tmp_path / "narrow"], report=tmp_path / "page.html")
    lines = capfd.readouterr().out.splitlines()
    named = dict(line.split(": ") for line in lines[1:3])
    # in the order of the command, whichever is better
    assert named == {
        "fspo (1)": "clip.width_high=0.015 clip.width_low=0.015",
        "fspo (2)": "clip.width_high=0.001 clip.width_low=0.001",
    }
    best, other = (line[:8] for line in lines[4:6])
    assert {best, other} == set(named)
    assert any(line.startswith(f"{best} - {other} ") for line in lines)


def test_compare_refuses_missing_runs(refused, tmp_path):
    assert "is not a folder" in refused("compare", tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert "no finished run in" in refused("compare", tmp_path / "empty")


@pytest.mark.long
def test_a_report_replaces_a_report_and_nothing_else(refused, runs, tmp_path):
    from rlzoo.cli.compare import compare

    mine = tmp_path / "thesis.html"
    mine.write_text("<!doctype html><html><head><title>mine</title></head></html>")
    for command in (("compare", runs), ("replay", runs / "fspo-0", "--clip", "rloo")):
        assert "is not an rlzoo report" in refused(*command, "--report", mine)
    assert "mine" in mine.read_text()
    page = tmp_path / "page.html"
    for _ in range(2):
        compare([runs], report=page, quiet=True)
    assert "<title>" in page.read_text()


def test_an_unwritable_report_path_is_refused_before_the_comparison(refused, runs, tmp_path):
    for wrong in (tmp_path, tmp_path / "none" / "page.html"):
        assert "in an existing folder" in refused("compare", runs, "--report", wrong)
