"""`rlzoo advantages` and `rlzoo corrections`: list, show, check and new."""

import json
import os
import re
import subprocess
import sys

import pytest

from rlzoo.testing import ADVANTAGE_LAWS, CORRECTION_LAWS
from tests.cli.test_new import QUICK, STYLE

KINDS = {
    "advantages": ("leave_one_out", ADVANTAGE_LAWS, "clip.advantage"),
    "corrections": ("icepop", CORRECTION_LAWS, "correction"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_installed_parts_are_listed_and_shown(rlzoo, kind):
    name, _, key = KINDS[kind]
    code, out, err = rlzoo(kind, "list", "--json")
    assert (code, err) == (0, "")
    rows = {row["name"]: row for row in json.loads(out)}
    assert name in rows
    assert all(row["what it does"].endswith((".", ":")) and row["paper"] for row in rows.values())
    listed = rlzoo(kind, "list")[1]
    assert all(row in listed for row in rows)
    shown = rlzoo(kind, "show", name)[1]
    assert "Formula:" in shown
    settings = json.loads(rlzoo(kind, "show", name, "--json")[1])["settings"]
    assert (f"--set {key}={name}" in shown) is bool(settings)
    for setting in settings:
        assert setting["name"] in shown


def test_an_alias_is_shown_as_its_target(rlzoo):
    assert rlzoo("advantages", "show", "pass@8")[1].startswith("pass_at_k  ")
    assert re.search("^pass_at_k .* also pass@2, pass@4", rlzoo("advantages", "list")[1], re.MULTILINE)


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_name_is_refused(refused, kind):
    line = refused(kind, "show", "icepob" if kind == "corrections" else "group_mena")
    assert line.startswith("unknown ")
    assert "did you mean" in line


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_is_checked_against_its_laws(rlzoo, kind, tmp_path, monkeypatch):
    name, laws, _ = KINDS[kind]
    (tmp_path / name).mkdir()  # a run directory with that name is not a plugin
    monkeypatch.chdir(tmp_path)
    code, out, _ = rlzoo(kind, "check", name)
    assert (code, out.count("pass")) == (0, len(laws))
    (report,) = json.loads(rlzoo(kind, "check", name, "--json")[1])
    assert [law["law"] for law in report["laws"]] == [law.name for law in laws]


def test_a_part_that_breaks_a_law_is_reported_with_the_observed_value(rlzoo, tmp_path):
    file = tmp_path / "wrong.py"
    file.write_text(
        "import torch\nfrom rlzoo import Correction, hookimpl\n"
        "class Wrong(Correction):\n    'Wrong.'\n    name, paper = 'wrong', 'none'\n"
        "    def weigh(self, inputs):\n        return torch.full((len(inputs.advantages), 1), 0.5)\n"
        "@hookimpl\ndef rlzoo_corrections():\n    return [Wrong]\n"
    )
    code, out, _ = rlzoo("corrections", "check", file)
    assert code == 1
    assert "agreement_weighs_one" in out
    assert "sampler and trainer agree on a response, but its weight is [0.5]" in out


@pytest.mark.long
@pytest.mark.parametrize("kind", ["corrections", "advantages"])
def test_a_new_part_is_written_keeps_its_laws_and_trains(rlzoo, zygote, kind, tmp_path):
    code, out, _ = rlzoo(kind, "new", "my-part", "--folder", tmp_path)
    folder = tmp_path / "rlzoo-my-part"
    module = folder / "rlzoo_my_part.py"
    assert code == 0
    assert f"rlzoo {kind} check {module}" in out
    assert rlzoo(kind, "check", module)[0] == 0
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "tests"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    for words in (("format", "--check"), ("check", "--extend-select", "I")):
        subprocess.run([sys.executable, "-m", "ruff", *words, *STYLE], cwd=folder, check=True, capture_output=True)
    key = KINDS[kind][2]
    words = ["train", "--plugin", module, "--clip", "grpo", "--set", f"{key}=my_part", "--output", "run", *QUICK]
    done = zygote.run(*words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "my_part" in (tmp_path / "run" / "config.yaml").read_text()
