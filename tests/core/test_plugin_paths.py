"""Plugins named by path: naming one twice loads it once, and a working copy replaces the installed distribution."""

import importlib
import logging
import shutil
import sys

import pytest

from rlzoo import RunConfig, UserError, load_zoo
from rlzoo.cli.kinds import CLIPS
from rlzoo.core.zoo import log_once
from rlzoo.gate.fingerprint import check_unchanged, run_facts
from rlzoo.journal.run_directory import RunDirectory
from rlzoo.lab.sweep import Sweep

SOURCE = '''
from rlzoo import ClipPolicy, hookimpl, ops

class Flat(ClipPolicy):
    """Does not clip."""
    name, paper, scope = "flat", "{paper}", "token"
    def __call__(self, inputs):
        return ops.clipped_surrogate(ops.log_ratio(inputs), inputs.advantages, band=None)

@hookimpl
def rlzoo_clip_policies():
    return [Flat]
'''
FLAT = SOURCE.format(paper="none")


@pytest.fixture
def flat(tmp_path):
    file = tmp_path / "flat.py"
    file.write_text(FLAT)
    return file


def other_names(flat, tmp_path):
    """The same plugin by other paths."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "link.py").symlink_to(flat)
    (tmp_path / "linked").symlink_to(tmp_path)
    return [flat, tmp_path / "sub" / ".." / "flat.py", tmp_path / "link.py", tmp_path / "linked" / "flat.py"]


def test_the_same_file_named_twice_is_one_plugin(flat, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for other in [*other_names(flat, tmp_path), "flat.py", "./sub/../flat.py"]:
        zoo = load_zoo([flat, other])
        assert zoo.outside() == {str(flat): ["flat"]}
        assert RunConfig.compose(clip="flat", plugins=[flat, other]).plugins == (str(flat),)


def test_a_name_takes_precedence_over_a_folder_of_that_name(tmp_path, monkeypatch):
    (tmp_path / "grpo").mkdir()
    (tmp_path / "grpo" / "flat.py").write_text(FLAT)
    monkeypatch.chdir(tmp_path)
    assert [entry.kind.name for entry in CLIPS.find("grpo", None)[1]] == ["grpo"]
    assert [entry.kind.name for entry in CLIPS.find("./grpo", None)[1]] == ["flat"]


def test_a_plugin_of_the_config_may_be_named_again(flat, tmp_path):
    before = RunConfig.compose(clip="flat", plugins=[flat])
    saved = tmp_path / "config.yaml"
    saved.write_text(before.to_yaml())
    for other in other_names(flat, tmp_path):
        again = RunConfig.compose([saved], clip="flat", plugins=[other])  # like --config RUN/config.yaml, and like --resume
        assert again == before
        assert RunConfig.compose([saved], clip="flat", plugins=[*before.plugins, other]) == before  # like replay
        sweep = Sweep(tmp_path / "sweep", ("flat",), (0,), configs=(str(saved),), plugins=(str(other),), steps=1)
        assert sweep.children[0].config.plugins == before.plugins


def test_a_file_and_the_folder_it_is_in_are_one_plugin(flat, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(flat, folder)
    (folder / "second.py").write_text(FLAT.replace('"flat"', '"second"'))
    for paths in ([folder, folder / "flat.py"], [folder / "flat.py", folder]):
        assert {"flat", "second"} <= set(load_zoo(paths))


def test_relative_plugin_paths_of_a_config_become_absolute(flat, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("plugins: [flat.py]\nclip: flat\n")
    assert RunConfig.compose(["mine.yaml"]).plugins == (str(flat),)


@pytest.fixture
def working_copy(tmp_path, monkeypatch):
    """An installed distribution, and a working copy of its module with another rule; returns the copy's file."""
    site = tmp_path / "site"
    info = site / "rlzoo_flat-0.1.dist-info"
    info.mkdir(parents=True)
    (site / "rlzoo_flat_under_test.py").write_text(SOURCE.format(paper="installed"))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: RLZOO.Flat\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[rlzoo]\nflat = rlzoo_flat_under_test\n")
    monkeypatch.syspath_prepend(str(site))
    file = tmp_path / "rlzoo-flat" / "src" / "rlzoo_flat_under_test.py"
    file.parent.mkdir(parents=True)
    file.write_text(SOURCE.format(paper="working copy"))
    log_once.cache_clear()
    importlib.invalidate_caches()
    yield file
    sys.modules.pop("rlzoo_flat_under_test", None)


@pytest.mark.parametrize("is_imported", [False, True], ids=["", "imported before"])
def test_a_working_copy_replaces_the_installed_distribution(working_copy, caplog, is_imported):
    if is_imported:
        assert load_zoo()["flat"].paper == "installed"
    with caplog.at_level(logging.INFO, logger="rlzoo"):
        zoo = load_zoo([working_copy])
    assert zoo["flat"].paper == "working copy"
    assert zoo.problems == []
    assert [record.getMessage() for record in caplog.records] == [
        f"plugin 'flat' from RLZOO.Flat 0.1 is not loaded: plugin '{working_copy}' replaces it"
    ]
    assert [entry.kind.paper for entry in zoo.asked_for()] == ["working copy"]  # rlzoo clips check
    assert RunConfig.compose(clip="flat", plugins=[working_copy]).clip.paper == "working copy"


def test_a_plugin_excluded_by_rlzoo_plugins_can_be_loaded_by_path(working_copy, monkeypatch):
    monkeypatch.setenv("RLZOO_PLUGINS", "")
    zoo = load_zoo([working_copy])
    assert zoo["flat"].paper == "working copy"
    assert zoo.problems == []


def test_a_file_in_another_project_replaces_nothing(working_copy, flat):
    with pytest.raises(UserError, match=r"rule 'flat' cannot be used: RLZOO\.Flat 0\.1 has the same name"):
        load_zoo([flat])["flat"]
    with pytest.raises(UserError, match=r"rule 'flat' cannot be used"):
        load_zoo([flat]).asked_for()
    assert RunConfig.compose(clip="grpo", plugins=[flat]).clip.name == "grpo"


def test_the_folder_of_a_distribution_is_refused_with_the_path_to_use(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    with pytest.raises(UserError, match="is the folder of a distribution; specify its"):
        load_zoo([tmp_path])


def test_a_file_with_the_name_of_a_bundled_module_replaces_nothing(tmp_path):
    file = tmp_path / "rlzoo_grpo.py"
    file.write_text(FLAT.replace('"flat"', '"grpo"'))
    with pytest.raises(UserError, match=r"rule 'grpo' cannot be used: rlzoo-llm .* has the same name"):
        load_zoo([file])["grpo"]
    assert RunConfig.compose(clip="gspo", plugins=[file]).clip.name == "gspo"


@pytest.fixture
def run(flat, tmp_path):
    """The directory of a run with a plugin."""
    config = RunConfig.compose(clip="flat", plugins=[flat], output=tmp_path / "run")
    RunDirectory.create(tmp_path / "run", config.to_yaml(), config.plugins, run_facts(config)).close()
    return tmp_path / "run"


def test_a_run_keeps_its_plugin_copy_after_the_plugin_is_installed(working_copy, tmp_path):
    config = RunConfig.compose(clip="flat", plugins=[working_copy], output=tmp_path / "run")
    RunDirectory.create(tmp_path / "run", config.to_yaml(), config.plugins, run_facts(config)).close()
    working_copy.unlink()
    config = RunConfig.compose([tmp_path / "run" / "config.yaml"])
    assert config.plugins == (str(tmp_path / "run" / "plugins" / working_copy.name),)
    assert config.clip.paper == "working copy"
    check_unchanged(config, run_facts(config))


def test_resuming_uses_the_changed_plugin_and_reading_uses_the_copy(run, flat):
    flat.write_text(SOURCE.format(paper="changed"))
    config = RunConfig.compose([run / "config.yaml"])
    assert config.clip.paper == "changed"
    with pytest.raises(UserError, match=r"plugin flat\.py has changed since the run started"):
        check_unchanged(config, run_facts(config))
    assert RunConfig.compose([run / "config.yaml"], use_changed_plugins=False).clip.paper == "none"
