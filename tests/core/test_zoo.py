"""Discovery: installed plugins, files and folders; a broken plugin only affects those who use it."""

import importlib
import logging
import sys
from importlib import metadata

import pytest

from rlzoo import ClipPolicy, RunConfig, UserError, load_zoo
from rlzoo.core.zoo import log_once

PLUGIN = """
from rlzoo import ClipPolicy, hookimpl, ops

class {kind}(ClipPolicy):
    "Does not clip."
    name, paper, scope = "{name}", "none", "token"
    def __call__(self, inputs):
        return ops.clipped_surrogate(ops.log_ratio(inputs), inputs.advantages, band=None)

@hookimpl
def rlzoo_clip_policies():
    return {returned}
"""
SOUND = PLUGIN.format(kind="Third", name="free", returned="[Third]")


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Put a distribution with one plugin module on the path, as pip would."""
    monkeypatch.syspath_prepend(str(tmp_path))
    log_once.cache_clear()

    def write(distribution, entry, source):
        module = distribution.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{module}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[rlzoo]\n{entry} = {module}\n")
        monkeypatch.delitem(sys.modules, module, raising=False)
        importlib.invalidate_caches()

    return write


def test_bundled_policies_are_found_by_entry_point_and_sorted():
    zoo = load_zoo()
    assert len(zoo) >= 20
    assert list(zoo) == sorted(zoo)
    assert {"fspo", "grpo", "gspo", "rloo"} <= set(zoo)
    assert all(issubclass(policy, ClipPolicy) and policy.name == name for name, policy in zoo.items())
    assert zoo.entries["fspo"].source == f"rlzoo-llm {metadata.version('rlzoo-llm')}"
    assert zoo.problems == []


def test_a_third_party_policy_is_found(install):
    install("third-party", "third", SOUND)
    zoo = load_zoo()
    assert zoo.entries["free"].source == "third-party 1.2"
    assert zoo["free"]().reduction == "sequence_mean"


NEWER = 'RLZOO_API = "1.99"\n' + SOUND
BROKEN = {
    "cannot be imported": ("import no_such_library\n", r"cannot be imported: ModuleNotFoundError: No module named 'no_such"),
    "exits when imported": ("raise SystemExit(3)\n", r"cannot be imported: SystemExit: 3"),
    "syntax error": ("def (:\n", r"cannot be imported: SyntaxError"),
    "raises in its hook": (
        SOUND.replace("return [Third]", "raise KeyError('x')"),
        r"raised an error in its hook .*KeyError: 'x'",
    ),
    "returns nothing": (
        SOUND.replace("return [Third]", "return None"),
        r"raised an error in its hook .*'NoneType' object is not iterable",
    ),
    "returns an instance": (
        SOUND.replace("[Third]", "[Third()]"),
        r"rule 'free' cannot be used: Third\(.*\) is not a concrete subclass",
    ),
    "returns an abstract class": (SOUND.replace("[Third]", "[ClipPolicy]"), r"is not a concrete subclass of ClipPolicy"),
    "yields and raises": (SOUND.replace("return [Third]", "yield 1 / 0"), r"raised an error in its hook .*ZeroDivisionError"),
    "misspells the hook": (
        SOUND.replace("clip_policies", "clip_polices"),
        r"no hook that this version of rlzoo knows, only 'rlzoo_clip_polices'; did you mean 'rlzoo_clip_policies'",
    ),
    "takes an argument": (SOUND.replace("policies():", "policies(zoo):"), r"is not valid: .*zoo"),
    "has no hook": (SOUND.replace("@hookimpl\n", ""), r"has no hook: add '@hookimpl"),
    "wants a newer interface": (NEWER, r"needs plugin interface 1.99, but this version of rlzoo has 1.2"),
    "names no version": ('RLZOO_API = "new"\n' + SOUND, r"RLZOO_API = 'new' is not a version such as '1.2'"),
    "takes a bundled name": (
        SOUND.replace('"free"', '"fspo"'),
        r"rule 'fspo' cannot be used: rlzoo-llm .* has the same name",
    ),
    "sets no scope": (
        SOUND.replace('name, paper, scope = "free", "none", "token"', 'name = paper = "free"'),
        r"not set 'scope'",
    ),
    "unknown scope": (SOUND.replace('"token"', '"word"'), r"scope 'word' \(allowed: token, sequence, batch\)"),
    "odd name": (SOUND.replace('"free"', '"Free Rule"'), r"name must be lower-case words"),
    "has a default that it refuses": (
        SOUND.replace("    def __call__", "    must: int = Field('x', validate_default=True)\n    def __call__").replace(
            "from rlzoo import", "from pydantic import Field\nfrom rlzoo import"
        ),
        r"'free' cannot be used: it cannot be constructed with its defaults: must: input should be a valid integer",
    ),
}


@pytest.mark.parametrize(("source", "reason"), BROKEN.values(), ids=list(BROKEN))
def test_a_broken_plugin_is_reported_and_the_others_load(install, caplog, source, reason):
    install("third-party", "third", source)
    install("sound-party", "sound", PLUGIN.format(kind="Sound", name="sound", returned="[Sound]"))
    bundled = {"fspo", "grpo", "gspo", "rloo"}
    with caplog.at_level(logging.WARNING, logger="rlzoo"):
        zoo = load_zoo()
        load_zoo()
    assert bundled | {"sound"} <= set(zoo)
    assert "free" not in zoo
    assert zoo.entries["fspo"].source.startswith("rlzoo-llm ")
    (record,) = caplog.records  # only once, however often the zoo is loaded
    assert "plugin 'third' from third-party 1.2" in record.getMessage()
    assert RunConfig.compose(clip="fspo").clip.name == "fspo"
    with pytest.raises(UserError, match=reason) as refusal:
        zoo["third"]
    assert "plugin 'third' from third-party 1.2" in str(refusal.value)


def test_using_a_policy_of_a_broken_plugin_is_an_error_with_the_reason(install):
    install("third-party", "third", SOUND.replace('"token"', '"word"'))
    reason = r"'free' cannot be used: it has scope 'word'.* \(plugin 'third' from third-party 1\.2\)"
    with pytest.raises(UserError, match=reason):
        RunConfig.compose(clip="free")


def test_two_external_plugins_with_the_same_policy_name_are_both_skipped(install):
    for party in ("first", "second", "third"):
        install(f"{party}-party", party, SOUND)
    zoo = load_zoo()
    assert "free" not in zoo
    with pytest.raises(
        UserError, match=r"'free' cannot be used: first-party 1\.2 has the same name; .* \(plugin .* from second-party 1\.2\)"
    ):
        zoo["free"]


def test_two_plugins_of_one_entry_point_name_both_load(install):
    # pluggy alone would silently ignore the second one
    install("third-party", "fspo", SOUND)
    assert {"fspo", "free"} <= set(load_zoo())


@pytest.mark.parametrize(
    ("value", "expected"),
    [("", set()), ("third", {"free"}), ("third-party", {"free"}), ("Third_Party, other", {"free", "two"}), ("other", {"two"})],
)
def test_rlzoo_plugins_restricts_what_is_loaded(install, monkeypatch, value, expected):
    install("third-party", "third", SOUND)
    install("other-party", "other", PLUGIN.format(kind="Two", name="two", returned="[Two]"))
    monkeypatch.setenv("RLZOO_PLUGINS", value)
    zoo = load_zoo()
    assert set(zoo) & {"free", "two"} == expected
    assert "fspo" in zoo


def test_an_uninstalled_name_in_rlzoo_plugins_is_reported(install, monkeypatch, caplog):
    monkeypatch.setenv("RLZOO_PLUGINS", "no-such")
    with caplog.at_level(logging.WARNING, logger="rlzoo"):
        load_zoo()
    assert "RLZOO_PLUGINS names 'no-such', which is not installed" in caplog.text


def test_a_restricted_plugin_is_not_even_imported(install, monkeypatch, caplog):
    install("third-party", "third", "raise RuntimeError('imported')\n")
    monkeypatch.setenv("RLZOO_PLUGINS", "")
    with caplog.at_level(logging.WARNING, logger="rlzoo"):
        load_zoo()
    assert caplog.text == ""


def test_using_an_excluded_policy_reports_how_to_allow_it(install, monkeypatch):
    install("third-party", "third", SOUND)
    monkeypatch.setenv("RLZOO_PLUGINS", "")
    zoo = load_zoo()
    why = r"RLZOO_PLUGINS excludes third \(third-party 1\.2\); add the plugins that you trust to it"
    with pytest.raises(UserError, match=f"rule 'third' cannot be used: {why}"):
        zoo["third"]
    with pytest.raises(UserError, match=f"unknown rule 'free'.*; not loaded: {why}"):
        zoo["free"]
    monkeypatch.setenv("RLZOO_PLUGINS", "third")
    with pytest.raises(UserError, match="unknown rule 'none-such'") as refusal:
        load_zoo()["none-such"]
    assert "RLZOO_PLUGINS" not in str(refusal.value)


def test_external_policies_are_listed_by_source(install, tmp_path):
    assert load_zoo().outside() == {}
    install("third-party", "third", SOUND)
    file = tmp_path / "mine.py"
    file.write_text(PLUGIN.format(kind="Mine", name="mine", returned="[Mine]"))
    assert load_zoo([file]).outside() == {str(file): ["mine"], "third-party 1.2": ["free"]}


def test_a_file_a_package_and_a_folder_of_files_can_be_named(tmp_path):
    file = tmp_path / "free.py"
    file.write_text(SOUND)
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("from .inner import rlzoo_clip_policies as rlzoo_clip_policies\n")
    (package / "inner.py").write_text(SOUND.replace('"free"', '"packed"'))
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("one", "two"):
        (folder / f"{name}.py").write_text(SOUND.replace('"free"', f'"{name}"'))
    (folder / "test_one.py").write_text("raise AssertionError('a test is no plugin')\n")
    zoo = load_zoo([file, package, folder])
    assert {"free", "packed", "one", "two"} <= set(zoo)
    assert zoo.entries["free"].source == str(file)
    assert load_zoo([file])["free"] is zoo["free"]
    assert [entry.kind.name for entry in load_zoo([folder]).asked_for()] == ["one", "two"]


def test_a_changed_file_is_read_again(tmp_path):
    file = tmp_path / "free.py"
    file.write_text(SOUND)
    assert "free" in load_zoo([file])
    file.write_text(SOUND.replace('"free"', '"freer"') + "\n# longer\n")
    assert "freer" in load_zoo([file])


@pytest.mark.parametrize(("source", "reason"), BROKEN.values(), ids=list(BROKEN))
def test_a_named_file_that_is_broken_is_an_error(tmp_path, source, reason):
    file = tmp_path / "mine.py"
    file.write_text(source)
    with pytest.raises(UserError, match=reason) as refusal:
        load_zoo([file])["fspo"]  # a name that is taken matters only if it is asked for
    assert f"plugin '{file}'" in str(refusal.value)


@pytest.mark.parametrize(
    ("path", "reason"), [("none.py", "does not exist"), ("notes.txt", "is not a .py file"), ("empty", "contains no")]
)
def test_a_path_without_a_plugin_is_an_error(tmp_path, path, reason):
    (tmp_path / "notes.txt").write_text("notes")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=reason):
        load_zoo([tmp_path / path])


def test_a_run_config_keeps_its_plugins(tmp_path):
    file = tmp_path / "free.py"
    file.write_text(SOUND)
    config = RunConfig.compose(clip="free", plugins=[file])
    saved = tmp_path / "config.yaml"
    saved.write_text(config.to_yaml())
    assert RunConfig.compose([saved]) == config
    assert config.plugins == (str(file),)


def test_a_config_given_as_a_policy_is_refused_with_a_hint():
    with pytest.raises(UserError, match="'dapo' is a config, not a rule: use --config dapo"):
        RunConfig.compose(clip="dapo")


PARTS = """
from pydantic import Field
from rlzoo import AdvantageEstimator, Correction, hookimpl

class Twice(AdvantageEstimator):
    "Twice the reward."
    name, paper, compares = "twice", "none", False
    aliases = {"thrice": {"factor": 3.0}}
    factor: float = Field(2.0, gt=0, description="what the reward is multiplied by")
    def estimate(self, inputs):
        return self.factor * inputs.rewards

class Halved(Correction):
    "Half of everything that moved."
    name, paper = "halved", "none"
    def weigh(self, inputs):
        return 1 - 0.5 * (inputs.log_ratio != 0).any(-1, keepdim=True)

@hookimpl
def rlzoo_advantages():
    return [Twice]

@hookimpl
def rlzoo_corrections():
    return [Halved]

@hookimpl
def rlzoo_tasks():
    return {"short-sums": "rlzoo.tasks.arithmetic:ArithmeticTask"}

@hookimpl
def rlzoo_samplers():
    return []
"""


def test_a_plugin_may_bring_estimators_corrections_and_tasks(install, caplog):
    install("third-party", "third", PARTS)
    with caplog.at_level(logging.WARNING, logger="rlzoo"):
        zoo = load_zoo()
    unknown = "has a hook 'rlzoo_samplers', which this version of rlzoo does not know; the rest of the plugin is loaded"
    assert unknown in caplog.text
    assert zoo.advantages.entries["twice"].source == "third-party 1.2"
    assert zoo.corrections.outside() == {"third-party 1.2": ["halved"]}
    overrides = ["clip.advantage=thrice", "correction=halved"]
    config = RunConfig.compose(clip="fspo", overrides=overrides)
    assert (config.estimator.name, config.estimator.factor) == ("twice", 3.0)
    assert config.correction.name == "halved"
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config
    settings = ["clip.advantage=twice", "clip.advantage.factor=5", "task=short-sums"]
    assert RunConfig.compose(clip="fspo", overrides=settings).estimator.factor == 5.0


def test_a_policy_with_an_unknown_estimator_is_skipped(install, tmp_path):
    source = SOUND.replace("    def __call__", "    advantage: Advantage = 'twice'\n    def __call__")
    install("third-party", "third", source.replace("import ClipPolicy", "import Advantage, ClipPolicy"))
    install("fourth-party", "fourth", (tmp_path / "third_party.py").read_text().replace('"free"', '"freed"'))
    for name in ("free", "freed"):
        with pytest.raises(UserError, match=f"rule {name!r} cannot be used: unknown advantage estimator 'twice'") as refusal:
            load_zoo()[name]
        assert "left out" not in str(refusal.value), "one problem does not tell of the others"
    install("other-party", "other", PARTS)
    assert load_zoo()["free"]().advantage == "twice"


def test_an_estimator_with_an_unknown_need_is_skipped(install):
    install("third-party", "third", PARTS.replace('"twice", "none", False', '"twice", "none", False\n    needs = {"critic"}'))
    with pytest.raises(UserError, match=r"'twice' cannot be used: it needs 'critic', which is not an optional input"):
        load_zoo().advantages["twice"]


def test_an_estimator_whose_needs_the_task_does_not_provide_is_refused():
    for name, missing in (("gigpo", "state_ids"), ("process", "token_rewards")):
        with pytest.raises(UserError, match=f"advantage {name!r} needs {missing}, which task 'arithmetic' does not provide"):
            RunConfig.compose(clip="grpo", overrides=[f"clip.advantage={name}"])


def test_an_entry_point_that_names_no_module_is_left_out(install, tmp_path, caplog):
    install("third-party", "third", SOUND)
    (tmp_path / "third_party-1.2.dist-info" / "entry_points.txt").write_text("[rlzoo]\nthird = \n")
    with caplog.at_level(logging.WARNING, logger="rlzoo"):
        assert "fspo" in load_zoo()
    assert caplog.messages[0].startswith("plugin 'third' from third-party 1.2 cannot be imported: ")


@pytest.mark.parametrize(
    ("metadata_file", "source"),
    [(None, "unknown distribution"), (b"", "unknown distribution"), (b"Name: third-party\n", "third-party")],
)
def test_a_damaged_distribution_is_reported_and_skipped(install, tmp_path, caplog, metadata_file, source):
    install("third-party", "third", "1 / 0")
    info = tmp_path / "third_party-1.2.dist-info"
    (info / "METADATA").unlink()
    if metadata_file is not None:
        (info / "METADATA").write_bytes(metadata_file)
    with caplog.at_level(logging.WARNING, logger="rlzoo"):
        assert "fspo" in load_zoo()
    (record,) = caplog.records
    assert record.getMessage().startswith(f"plugin 'third' from {source} cannot be imported: ZeroDivisionError")
