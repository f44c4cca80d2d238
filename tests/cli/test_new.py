"""`rlzoo clips new`, and the steps from a new plugin to training."""

import os
import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import version

import pytest

from rlzoo import testing
from rlzoo.core.zoo import load_zoo
from tests.cli.conftest import SOUND

LAWS = [law.name for law in testing.LAWS]
QUICK = [
    "--steps", "1", "--set", "rollout.num_prompts=4", "--set", "rollout.group_size=4", "--set", "task.num_operands_max=4",
    "--set", "rollout.max_new_tokens=12", "--set", "eval.num_problems=4",
]  # fmt: skip
STYLE = ["--isolated", "--no-cache", "--line-length", "128", "."]  # for a user without settings
OURS = f"rlzoo-llm {version('rlzoo-llm')}"


@pytest.mark.parametrize("name", ["My-Rule", "my_rule", "1-rule", "my--rule", "my-", "my rule", "../my-rule", ""])
def test_new_refuses_an_invalid_name(refused, name):
    assert refused("clips", "new", name) == (
        f"name {name!r}: expected lower-case words of letters and digits, joined by hyphens, such as 'my-rule'"
    )


def test_new_refuses_a_name_that_is_taken(refused):
    assert refused("clips", "new", "fspo") == f"name 'fspo' is taken by {OURS}; choose another"
    assert refused("clips", "new", "covariance").startswith("name 'covariance': a module rlzoo_covariance is already installed")


def test_new_refuses_a_folder_that_exists(refused, tmp_path):
    (tmp_path / "here" / "rlzoo-my-rule").mkdir()
    assert refused("clips", "new", "my-rule") == "'rlzoo-my-rule' already exists; choose another name or folder"
    (tmp_path / "here" / "file").write_text("in the way")
    target = tmp_path / "here" / "file" / "rlzoo-my-rule"
    line = refused("clips", "new", "my-rule", "--folder", tmp_path / "here" / "file")
    assert line == f"'{target}' cannot be written: Not a directory"


@pytest.fixture
def written(rlzoo, tmp_path):
    """The folder that `rlzoo clips new my-rule` writes."""
    code, out, err = rlzoo("clips", "new", "my-rule", "--folder", tmp_path / "made")
    assert (code, err) == (0, "")
    folder = tmp_path / "made" / "rlzoo-my-rule"
    module = folder / "rlzoo_my_rule.py"
    assert out.splitlines() == [
        f"wrote {folder}; the rule is in {module}",
        f"  rlzoo clips check {module}",
        f"  rlzoo train --plugin {module} --clip my-rule --steps 2",
        f"  pip install -e {folder} && rlzoo train --clip my-rule --steps 2",
    ]
    return folder


def test_the_printed_commands_work_with_any_folder(rlzoo, tmp_path):
    folder = tmp_path / "it's $HOME; (mine)"
    _, out, _ = rlzoo("advantages", "new", "my-baseline", "--folder", folder)
    check, train, install = (shlex.split(line) for line in out.splitlines()[1:])
    module = str(folder / "rlzoo-my-baseline" / "rlzoo_my_baseline.py")
    assert (check[3], train[3], install[3]) == (module, module, str(folder / "rlzoo-my-baseline"))
    assert rlzoo(*check[1:])[0] == 0


def run_in(folder, *command):
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    answer = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


def test_a_new_distribution_has_a_module_a_test_a_page_and_packaging(written):
    files = sorted(str(path.relative_to(written)) for path in written.rglob("*") if path.is_file())
    assert files == ["README.md", "pyproject.toml", "rlzoo_my_rule.py", "tests/test_my_rule.py"]
    project = tomllib.loads((written / "pyproject.toml").read_text())["project"]
    assert project["name"] == "rlzoo-my-rule"
    assert project["entry-points"] == {"rlzoo": {"my-rule": "rlzoo_my_rule"}}
    assert project["dependencies"] == [f"rlzoo-llm>={'.'.join(version('rlzoo-llm').split('.')[:2])}"]
    assert not any("$" in (written / file).read_text() for file in files)


def test_a_new_policy_keeps_every_law_unmodified(written):
    (entry,) = load_zoo([written / "rlzoo_my_rule.py"]).asked_for()
    assert entry.kind.name == "my-rule"
    assert {outcome.law: outcome.status for outcome in testing.check(entry.kind())} == dict.fromkeys(LAWS, "pass")


@pytest.mark.long
def test_a_new_distribution_passes_its_own_tests(written):
    out = run_in(written, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "tests")
    assert f"{len(LAWS) + 1} passed" in out


def test_a_new_distribution_passes_formatter_and_linter(written):
    run_in(written, "-m", "ruff", "format", "--check", *STYLE)
    run_in(written, "-m", "ruff", "check", "--select", "E,F,W", *STYLE)


def test_a_new_distribution_is_clean_by_ruffs_default_rules(written):
    run_in(written, "-m", "ruff", "check", "--extend-select", "I", *STYLE)  # newer versions of ruff sort imports by default


@pytest.mark.long
def test_a_new_policy_is_listed_checked_and_trained_from_its_module(written, rlzoo, zygote, tmp_path):
    written = written / "rlzoo_my_rule.py"
    listed = " ".join(rlzoo("clips", "list", "--plugin", written)[1].split())
    assert f" my-rule sequence group_norm sequence_mean none yet {written} " in listed
    assert rlzoo("clips", "check", written)[0] == 0
    # a new process, which has not imported the plugin yet
    done = zygote.run("train", "--plugin", written, "--clip", "my-rule", "--output", "run", *QUICK, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("my-rule on arithmetic")
    assert "step 1/1" in done.stdout
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") >= 1
    assert f"plugins:\n- {written}\n" in (tmp_path / "run" / "config.yaml").read_text()


# train --plugin


def test_train_refuses_a_plugin_that_does_not_exist(refused, tmp_path):
    missing = tmp_path / "none.py"
    assert refused("train", "--plugin", missing) == (
        f"plugin '{missing}' does not exist; specify a .py file, a package, or a folder of .py files"
    )
    (tmp_path / "notes.txt").write_text("notes")
    line = refused("train", "--plugin", tmp_path / "notes.txt")
    assert line.startswith(f"plugin '{tmp_path / 'notes.txt'}' is not a .py file; specify ")
    (tmp_path / "empty").mkdir()
    assert refused("train", "--plugin", tmp_path / "empty") == f"plugin '{tmp_path / 'empty'}' contains no .py file"


def test_train_refuses_a_plugin_without_a_hook(refused, plugin):
    file = plugin(SOUND, returned="Plain")
    file.write_text(SOUND)
    assert refused("train", "--plugin", file) == (
        f"plugin '{file}' has no hook: add '@hookimpl def rlzoo_clip_policies(): return [YourPolicy]'"
    )


def test_train_refuses_a_plugin_whose_policy_has_a_name_that_is_taken(refused, plugin):
    file = plugin(SOUND.replace('"plain"', '"fspo"'), returned="Plain")
    taken = f"rule 'fspo' cannot be used: {OURS} has the same name; rename or uninstall one of them"
    assert refused("train", "--plugin", file, "--clip", "fspo") == f"{taken} (plugin '{file}')"
    first, second = (plugin(SOUND, returned="Plain", name=name) for name in ("first.py", "second.py"))
    line = refused("train", "--plugin", first, "--plugin", second, "--clip", "plain")
    taken = f"{first} has the same name; rename or uninstall one of them"
    assert line == f"rule 'plain' cannot be used: {taken} (plugin '{second}')"


def test_train_refuses_unknown_settings_of_a_plugin_policy(refused, plugin):
    file = plugin(SOUND, returned="Plain")
    named = ("train", "--plugin", file, "--clip", "plain")
    assert refused(*named, "--set", "clip.width=2") == "clip.width=2: input should be less than 1"
    assert refused(*named, "--set", "clip.widht=0.1") == "unknown key 'clip.widht'; did you mean 'clip.width'?"
    assert refused(*named, "--set", "clip.zzz=0.1") == "unknown key 'clip.zzz' (allowed: advantage, reduction, width)"


@pytest.mark.long
def test_train_with_a_plugin_has_its_policy_in_the_configuration(rlzoo, plugin):
    file = plugin(SOUND, returned="Plain")
    code, out, _ = rlzoo("train", "--plugin", file, "--clip", "plain", "--set", "clip.width=0.5", "--dry-run")
    assert code == 0
    assert "name: plain\n" in out
    assert "width: 0.5\n" in out
    assert str(file) in out
