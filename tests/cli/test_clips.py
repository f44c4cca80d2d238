"""`rlzoo clips` and `rlzoo train --plugin`: what is listed and shown, what a check finds, and a plugin from first to last."""

import json
import os
import subprocess
import sys
import time
import tomllib
from importlib.metadata import version

import pytest

from rlzoo import load_zoo, testing
from rlzoo.cli import main
from rlzoo.zoo import find_policies

LAWS = [law.name for law in testing.LAWS]
PARTS = ("Formula:", "Where:", "Differences from GRPO:", "Reference:")  # after the sentence that opens a docstring
QUICK = [
    "--steps", "1", "--set", "rollout.num_prompts=4", "--set", "rollout.group_size=4", "--set", "task.num_operands_max=4",
    "--set", "rollout.max_new_tokens=12", "--set", "eval.num_problems=4",
]  # fmt: skip
STYLE = ["--isolated", "--no-cache", "--line-length", "128", "."]  # of one who has no settings of his own
OURS = f"rlzoo {version('rlzoo')}"

SOUND = '''
from typing import Annotated, ClassVar
from pydantic import Field
from rlzoo import ClipPolicy, Width, hookimpl, ops

class Plain(ClipPolicy):
    """Clips every token to a band; [brackets] stay.

    Formula:
        J = what it is
    """
    name, paper, scope = "plain", "arXiv 0000.00000", "token"
    watch: ClassVar = {"clip/fraction": "how much [is] clipped"}
    width: Annotated[float, Width()] = Field(0.25, gt=0, lt=1, description="half-width of the band [nats]")
    def __call__(self, inputs):
        log_ratio = ops.log_ratio(inputs)
        band = ops.ratio_band(self.width, self.width, None, like=log_ratio)
        return ops.clipped_surrogate(log_ratio, inputs.advantages, band)
'''
REVERSED = '''
import dataclasses

class Reversed(Plain):
    """Pushes every response the wrong way."""
    name = "reversed"
    def __call__(self, inputs):
        result = super().__call__(inputs)
        return dataclasses.replace(result, objective=-result.objective)
'''
HOOK = """
@hookimpl
def rlzoo_clip_policies():
    return [{}]
"""


@pytest.fixture
def rlzoo(tmp_path, monkeypatch, capfd):
    """Run a command in this process, in a directory of its own; returns its exit code, stdout and stderr."""
    here = tmp_path / "here"
    here.mkdir()

    def run(*arguments):
        monkeypatch.chdir(here)
        monkeypatch.setenv("COLUMNS", "400")  # no line is folded
        monkeypatch.setattr(sys, "argv", ["rlzoo", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        return exit_.value.code or 0, *capfd.readouterr()

    return run


@pytest.fixture
def refused(rlzoo, tmp_path):
    """Run a command that must be refused and write nothing where it runs; returns its one line."""

    def run(*arguments):
        before = sorted((tmp_path / "here").rglob("*"))
        code, out, err = rlzoo(*arguments)
        assert code == 2
        assert out == ""
        assert err.startswith("rlzoo: ")
        assert err.count("\n") == 1, err
        assert sorted((tmp_path / "here").rglob("*")) == before
        return err.removeprefix("rlzoo: ").strip()

    return run


@pytest.fixture
def plugin(tmp_path):
    """Write a plugin file; returns its path."""

    def write(*parts, returned, name="mine.py"):
        file = tmp_path / "plugins" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(parts) + HOOK.format(returned))
        return file

    return write


# clips list


def test_list_tells_of_every_policy_what_it_is_where_it_is_from_and_what_it_does(rlzoo):
    code, out, err = rlzoo("clips", "list")
    assert (code, err) == (0, "")
    lines = [line.rstrip() for line in out.splitlines()]
    zoo = load_zoo()
    assert len(lines) == 2 * len(zoo)
    for (name, policy), head, sentence in zip(zoo.items(), lines[::2], lines[1::2], strict=True):
        defaults = policy()
        assert head == f"{name}  {policy.scope}, {defaults.advantage}, {defaults.reduction}  {policy.paper}  {OURS}"
        assert sentence == " " * 6 + policy.__doc__.partition("\n")[0]
        assert sentence.endswith(".")


def test_list_as_json_holds_the_same(rlzoo):
    rows = {row["name"]: row for row in json.loads(rlzoo("clips", "list", "--json")[1])}
    assert list(rows) == list(load_zoo())
    assert rows["gspo"] == {
        "name": "gspo",
        "what it does": "Clips the geometric mean of a response's token ratios, with one narrow band for every length.",
        "scope": "sequence",
        "advantage": "group_norm",
        "reduction": "sequence_mean",
        "paper": "arXiv 2507.18071",
        "from": OURS,
    }


def test_list_and_show_take_a_plugin_file(rlzoo, plugin):
    file = plugin(SOUND, returned="Plain")
    code, out, _ = rlzoo("clips", "list", "--plugin", file)
    assert code == 0
    lines = [line.rstrip() for line in out.splitlines()]
    place = lines.index(f"plain  token, group_norm, sequence_mean  arXiv 0000.00000  {file}")
    assert lines[place + 1] == "      Clips every token to a band; [brackets] stay."
    assert "plain  token" not in rlzoo("clips", "list")[1]
    (row,) = [row for row in json.loads(rlzoo("clips", "list", "--plugin", file, "--json")[1]) if row["name"] == "plain"]
    assert row["from"] == str(file)
    code, out, _ = rlzoo("clips", "show", "plain", "--plugin", file)
    assert code == 0
    for text in ("Clips every token to a band; [brackets] stay.", "half-width of the band [nats]", "how much [is] clipped"):
        assert text in out
    assert json.loads(rlzoo("clips", "show", "plain", "--plugin", file, "--json")[1])["from"] == str(file)


def test_a_plugin_that_was_not_named_is_not_known(refused, plugin):
    plugin(SOUND, returned="Plain")
    assert refused("clips", "show", "plain").startswith("unknown clip policy 'plain' (installed: alpha-band, ")


# clips show


@pytest.mark.parametrize("folder", ["[red]", "a[/b]"])
def test_brackets_in_a_path_or_a_reference_are_shown_as_they_are(rlzoo, plugin, tmp_path, folder):
    (tmp_path / "plugins" / folder).mkdir(parents=True)
    file = plugin(SOUND.replace("arXiv 0000.00000", "note [bold] 7"), returned="Plain", name=f"{folder}/mine.py")
    for command in (("list",), ("show", "plain")):
        code, out, _ = rlzoo("clips", *command, "--plugin", file)
        assert code == 0
        assert str(file) in out
        assert "note [bold] 7" in out
    assert rlzoo("clips", "check", file)[1].startswith("plain  note [bold] 7")


def test_show_has_the_five_parts_the_fields_and_the_metrics(rlzoo):
    code, out, err = rlzoo("clips", "show", "fspo-adaptive")
    assert (code, err) == (0, "")
    lines = [line.rstrip() for line in out.splitlines()]
    policy = load_zoo()["fspo-adaptive"]
    assert lines[0] == f"fspo-adaptive  {OURS}  {policy.paper}"
    assert (
        lines[2]
        == "Clips the importance ratio of a whole response to a band that learns to clip the same share at every length."
    )
    places = [lines.index(part) for part in (*PARTS, "Settings (--set clip.NAME=VALUE)", "Watch these metrics")]
    assert places == sorted(places)
    table = {line.split()[0]: " ".join(line.split()[1:]) for line in lines[places[-2] + 2 : places[-1]] if line}
    assert list(table) == list(policy.model_fields)
    assert table["target_clip_fraction"] == "0.1 > 0, < 0.5 share of responses to clip, at every length and sign"
    assert table["ceiling_factor"] == (
        "3.0 > 0, <= 1000 or null dual clip where A < 0: ceiling in units of the width below; null for none"
    )
    assert table["num_updates"] == "0 >= 0 state: updates in drift and spread"
    assert table["reduction"] == (
        '"sequence_mean" token_mean, sequence_mean, sequence_mean_token_sum, constant_length how the objective becomes a scalar'
    )
    watched = lines[places[-1] + 1 : places[-1] + 1 + len(policy.watch)]
    assert watched == [f"  {metric}: {meaning}" for metric, meaning in policy.watch.items()]


@pytest.mark.parametrize("name", list(load_zoo()))
def test_every_policy_is_shown_with_all_of_its_parts(rlzoo, name):
    code, out, _ = rlzoo("clips", "show", name)
    assert code == 0
    lines = [line.rstrip() for line in out.splitlines()]
    policy = load_zoo()[name]
    assert all(lines.count(part) == 1 for part in PARTS)
    assert all(any(line.startswith(f"{field} ") for line in lines) for field in policy.model_fields)
    assert policy.watch
    assert all(f"  {law}: {reason}" in lines for law, reason in policy.exempt.items())


def test_show_as_json_holds_the_same(rlzoo):
    shown = json.loads(rlzoo("clips", "show", "kl-cov", "--json")[1])
    policy = load_zoo()["kl-cov"]
    assert list(shown) == [
        "name", "what it does", "scope", "advantage", "reduction", "paper", "from", "doc", "settings", "watch", "opted out",
    ]  # fmt: skip
    assert shown["opted out"] == dict(policy.exempt)
    assert shown["watch"] == dict(policy.watch)
    assert all(part in shown["doc"] for part in PARTS)
    fields = {field["name"]: field for field in shown["settings"]}
    assert list(fields) == list(policy.model_fields)
    assert fields["fraction"] == {
        "name": "fraction",
        "default": 2e-3,
        "allowed": "> 0, <= 1",
        "description": "share of the step's tokens that is penalised; at least one token",
    }


# clips check


def laws_of(out):
    """The lines of a printed check: number, law, and what came of it."""
    lines = [line.split(maxsplit=2) for line in out.splitlines()]
    return {line[1]: line[2].rstrip() for line in lines if len(line) == 3 and line[1] in LAWS}


def test_check_names_every_law_and_passes(rlzoo):
    started = time.perf_counter()
    code, out, err = rlzoo("clips", "check", "gspo")
    assert time.perf_counter() - started < 15
    assert (code, err) == (0, "")
    assert out.startswith("gspo  arXiv 2507.18071")
    assert laws_of(out) == dict.fromkeys(LAWS, "pass")
    assert f"{len(LAWS)} kept, 0 broken, 0 opted out, in " in out


def test_check_tells_which_laws_are_opted_out_of_and_why(rlzoo):
    exempt = load_zoo()["kl-cov"].exempt
    code, out, _ = rlzoo("clips", "check", "kl-cov")
    assert code == 0
    expected = {law: f"opted out  {exempt[law]}" if law in exempt else "pass" for law in LAWS}
    assert laws_of(out) == expected
    assert f"{len(LAWS) - len(exempt)} kept, 0 broken, {len(exempt)} opted out, in " in out


def test_check_of_a_broken_policy_shows_law_statement_and_smallest_input(rlzoo, plugin):
    file = plugin(SOUND, REVERSED, returned="Reversed")
    code, out, err = rlzoo("clips", "check", file)
    assert (code, err) == (1, "")
    found = laws_of(out)
    assert found.pop("ratio_one_is_reinforce") == "fail  the gradient is not along the advantage"
    assert set(found.values()) == {"pass"}
    lines = [line.rstrip() for line in out.splitlines()]
    place = lines.index(
        "ratio_one_is_reinforce: At ratio 1 nothing is clipped and the gradient is A times one positive constant per row."
    )
    assert lines[place + 1] == "fails on"
    assert lines[place + 2].startswith("  A = ")  # one response
    assert lines[place + 3] == "11 kept, 1 broken, 0 opted out, in " + lines[place + 3].rpartition(" in ")[2]


def test_the_smallest_input_that_shows_a_failure_has_a_token(rlzoo, plugin):
    file = plugin(SOUND, REVERSED, returned="Reversed")
    out = rlzoo("clips", "check", file)[1]
    # one response of one token, its advantage rounded to a whole number
    (line,) = [line.rstrip() for line in out.splitlines() if line.startswith("  A = ")]
    assert line in ("  A = -1: log-ratios +0", "  A = +1: log-ratios +0")
    inputs = [law["inputs"] for law in json.loads(rlzoo("clips", "check", file, "--json")[1])[0]["laws"] if law["inputs"]]
    assert [found["response_mask"] for found in inputs] == [[[True]]]


def test_check_as_json_holds_the_same(rlzoo, plugin):
    file = plugin(SOUND, REVERSED, returned="Plain, Reversed")
    code, out, _ = rlzoo("clips", "check", file, "--json")
    assert code == 1
    plain, reversed_ = json.loads(out)
    assert (plain["policy"], reversed_["policy"]) == ("plain", "reversed")
    for report in (plain, reversed_):
        assert [law["law"] for law in report["laws"]] == LAWS
        assert all(list(law) == ["law", "status", "detail", "inputs"] for law in report["laws"])
    assert {law["status"] for law in plain["laws"]} == {"pass"}
    (failed,) = [law for law in reversed_["laws"] if law["status"] == "fail"]
    assert failed["law"] == "ratio_one_is_reinforce"
    assert failed["detail"] == "the gradient is not along the advantage"
    assert failed["inputs"]["log_probs"] == failed["inputs"]["old_log_probs"]
    assert len(failed["inputs"]["advantages"]) == len(failed["inputs"]["response_mask"]) == 1  # one response shows it


def test_check_of_an_installed_policy_as_json_gives_the_reasons(rlzoo):
    code, out, _ = rlzoo("clips", "check", "topr", "--json")
    (report,) = json.loads(out)
    assert code == 0
    opted_out = {law["law"]: law["detail"] for law in report["laws"] if law["status"] == "opted out"}
    assert opted_out == dict(load_zoo()["topr"].exempt)
    assert all(law["inputs"] is None for law in report["laws"])


def test_check_holds_every_policy_of_a_file_to_the_laws(rlzoo, plugin):
    code, out, _ = rlzoo("clips", "check", plugin(SOUND, REVERSED, returned="Plain, Reversed"))
    assert code == 1  # one of the two is broken
    heads = [line.rstrip() for line in out.splitlines() if line.endswith("arXiv 0000.00000")]
    assert heads == ["plain  arXiv 0000.00000", "reversed  arXiv 0000.00000"]
    assert [line.partition(", in ")[0] for line in out.splitlines() if " kept, " in line] == [
        "12 kept, 0 broken, 0 opted out",
        "11 kept, 1 broken, 0 opted out",
    ]


def test_a_policy_that_raises_fails_the_law_with_what_it_raised(rlzoo, plugin):
    raising = SOUND.replace("log_ratio = ops.log_ratio(inputs)", "raise ValueError('no such [tensor]')")
    code, out, err = rlzoo("clips", "check", plugin(raising, returned="Plain"))
    assert (code, err) == (1, "")
    assert laws_of(out)["is_pure"] == "fail  ValueError: no such [tensor]"
    assert laws_of(out)["settings_are_complete"].startswith("fail")  # its example needs the policy, too


def test_check_refuses_what_is_not_there(refused, plugin, tmp_path):
    assert refused("clips", "check", "gsop").endswith("; did you mean 'gspo'?")
    missing = tmp_path / "none.py"
    assert refused("clips", "check", missing).startswith(f"plugin '{missing}' does not exist; give a .py file")
    file = plugin(SOUND, "import no_such_library\n", returned="Plain")
    assert refused("clips", "check", file) == (
        f"plugin '{file}' cannot be imported: ModuleNotFoundError: No module named 'no_such_library'"
    )


# clips new


@pytest.mark.parametrize("name", ["My-Rule", "my_rule", "1-rule", "my--rule", "my-", "my rule", "../my-rule", ""])
def test_new_refuses_a_name_that_is_none(refused, name):
    assert refused("clips", "new", name) == (
        f"name {name!r}: lower-case words of letters and digits with hyphens between them, such as 'my-rule'"
    )


def test_new_refuses_a_name_that_is_taken(refused):
    assert refused("clips", "new", "fspo") == f"name 'fspo' is taken by {OURS}; choose another"


def test_new_refuses_a_folder_that_exists(refused, tmp_path):
    (tmp_path / "here" / "rlzoo-my-rule").mkdir()
    assert refused("clips", "new", "my-rule") == "'rlzoo-my-rule' exists already; choose another name or folder"
    (tmp_path / "here" / "file").write_text("in the way")
    target = tmp_path / "here" / "file" / "rlzoo-my-rule"
    line = refused("clips", "new", "my-rule", "--folder", tmp_path / "here" / "file")
    assert line == f"'{target}' cannot be written: Not a directory"


UNUSABLE = {
    "none": "its class would be None",
    "annotated": "its class would hide typing.Annotated",
    "clip-band": "its class would hide rlzoo's ClipBand",
    "covariance": "its module would hide the bundled plugin rlzoo_covariance",
    "a" * 300: "no file may have so long a name",
}


@pytest.mark.parametrize("name", UNUSABLE, ids=[name[:12] for name in UNUSABLE])
def test_new_refuses_a_name_that_no_module_or_class_can_have(refused, name):
    assert refused("clips", "new", name).startswith(f"name {name!r}")


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
    assert project["dependencies"] == [f"rlzoo>={'.'.join(version('rlzoo').split('.')[:2])}"]
    assert not any("$" in (written / file).read_text() for file in files)


def test_a_new_policy_keeps_every_law_as_it_is(written):
    (policy,) = find_policies(str(written / "rlzoo_my_rule.py"))
    assert policy.name == "my-rule"
    assert {outcome.law: outcome.status for outcome in testing.check(policy())} == dict.fromkeys(LAWS, "pass")


def test_a_new_distribution_passes_its_own_tests(written):
    out = run_in(written, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "tests")
    assert f"{len(LAWS) + 1} passed" in out


def test_a_new_distribution_is_formatted_and_free_of_mistakes(written):
    run_in(written, "-m", "ruff", "format", "--check", *STYLE)
    run_in(written, "-m", "ruff", "check", "--select", "E,F,W", *STYLE)


def test_a_new_distribution_is_clean_by_ruffs_default_rules(written):
    run_in(written, "-m", "ruff", "check", "--extend-select", "I", *STYLE)  # newer ruffs sort imports by default


def test_a_new_policy_is_listed_checked_and_trained_from_its_folder(written, rlzoo, tmp_path):
    assert (
        f"my-rule  sequence, group_norm, sequence_mean  none yet  {written}" in rlzoo("clips", "list", "--plugin", written)[1]
    )
    assert rlzoo("clips", "check", written)[0] == 0
    out = run_in(
        tmp_path, "-m", "rlzoo", "train", "--plugin", str(written), "--clip", "my-rule", "--output", "run", *QUICK
    )  # a process of its own, which has not imported the plugin yet
    assert out.startswith("my-rule on arithmetic")
    assert "step 1/1" in out
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") >= 1
    assert f"plugins:\n- {written}\n" in (tmp_path / "run" / "config.yaml").read_text()


# train --plugin


def test_train_refuses_a_plugin_that_does_not_exist(refused, tmp_path):
    missing = tmp_path / "none.py"
    assert refused("train", "--plugin", missing) == (
        f"plugin '{missing}' does not exist; give a .py file, a package, or the folder of a distribution"
    )
    (tmp_path / "notes.txt").write_text("notes")
    line = refused("train", "--plugin", tmp_path / "notes.txt")
    assert line.startswith(f"plugin '{tmp_path / 'notes.txt'}' is not a .py file; give ")
    (tmp_path / "empty").mkdir()
    assert refused("train", "--plugin", tmp_path / "empty") == f"plugin '{tmp_path / 'empty'}' holds no .py file"


def test_train_refuses_a_plugin_without_a_hook(refused, plugin):
    file = plugin(SOUND, returned="Plain")
    file.write_text(SOUND)
    assert refused("train", "--plugin", file) == (
        f"plugin '{file}' has no hook: add '@hookimpl def rlzoo_clip_policies(): return [YourPolicy]'"
    )


def test_train_refuses_a_plugin_whose_policy_has_a_name_that_is_taken(refused, plugin):
    file = plugin(SOUND.replace('"plain"', '"fspo"'), returned="Plain")
    taken = f"returned clip policy 'fspo', which {OURS} has too: rename or uninstall one"
    assert refused("train", "--plugin", file, "--clip", "fspo") == f"plugin '{file}' {taken}"
    first, second = (plugin(SOUND, returned="Plain", name=name) for name in ("first.py", "second.py"))
    line = refused("train", "--plugin", first, "--plugin", second, "--clip", "plain")
    assert line == f"plugin '{second}' returned clip policy 'plain', which {first} has too: rename or uninstall one"


def test_train_refuses_settings_that_the_plugins_policy_has_not(refused, plugin):
    file = plugin(SOUND, returned="Plain")
    named = ("train", "--plugin", file, "--clip", "plain")
    assert refused(*named, "--set", "clip.width=2") == "clip.width=2: input should be less than 1"
    assert refused(*named, "--set", "clip.widht=0.1") == (
        "unknown key 'clip.widht' (allowed: advantage, reduction, width); did you mean 'width'?"
    )


def test_train_with_a_plugin_has_its_policy_in_the_configuration(rlzoo, plugin):
    file = plugin(SOUND, returned="Plain")
    code, out, _ = rlzoo("train", "--plugin", file, "--clip", "plain", "--set", "clip.width=0.5", "--dry-run")
    assert code == 0
    assert "name: plain\n" in out
    assert "width: 0.5\n" in out
    assert str(file) in out
