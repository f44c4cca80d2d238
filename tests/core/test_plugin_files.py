"""The plugin files that a run keeps: no outputs, no caches, a size limit, and separate copies of plugins with the same name."""

import pytest

from rlzoo import UserError
from rlzoo.core import plugin_files
from rlzoo.core.plugin_files import copy_names, digest
from rlzoo.journal.run_directory import RunDirectory

FILES = {
    "pyproject.toml": "[project]\n",
    "README.md": "a page",
    "rule.py": "WIDTH = 1\n",
    "data/table.json": "{}",
    "inner/__init__.py": "",
    "inner/more.py": "MORE = 1\n",
}
NO_PART = {
    ".git/HEAD": "ref",
    ".venv/lib/x.py": "x",
    "venv/pyvenv.cfg": "home",
    "venv/lib/x.py": "x",
    "__pycache__/rule.pyc": "x",
    "inner/__pycache__/more.pyc": "x",
    "rule.egg-info/PKG-INFO": "x",
    "build/lib/rule.py": "x",
    "dist/rule.whl": "x",
    "mlflow.db": "x",
    "mlruns/0/meta.yaml": "x",
    "runs/one/config.yaml": "x",
    "runs/one/run.json": "{}",
    "runs/one/metrics.jsonl": "x",
    "runs/one/plugins/rule.py": "x",
    "out/run.json": "{}",
    "out/checkpoints/step-1/model.safetensors": "x",
    ".out.part/config.yaml": "x",
}


def write(folder, files):
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


@pytest.fixture
def project(tmp_path):
    return write(tmp_path / "project", FILES | NO_PART)


def kept(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_run_inside_its_plugins_folder_copies_the_plugin_and_nothing_else(project):
    for number in range(3):  # each would be included in the next one's copy
        run = RunDirectory.create(project / f"out-{number}", "steps: 1\n", [str(project)])
        run.close()
        assert kept(run.path / "plugins" / "project") == set(FILES)


def test_the_digest_is_that_of_the_code_and_its_data(project):
    before = digest(project)
    write(project, {"README.md": "another page", "report.html": "x", "runs/two/run.json": "{}", "runs/two/rollouts/a.py": "x"})
    assert digest(project) == before
    for name in ("rule.py", "inner/more.py", "pyproject.toml", "data/table.json"):
        changed = write(project, {name: FILES[name] + "# changed\n"})
        assert digest(changed) != before
        write(project, {name: FILES[name]})
        assert digest(project) == before
    (project / "inner" / "more.py").rename(project / "inner" / "other.py")
    assert digest(project) != before


def test_a_broken_link_is_left_out(project):
    (project / "inner" / "broken").symlink_to(project / "nowhere")
    (project / "linked.py").symlink_to(project / "rule.py")
    assert set(plugin_files.plugin_files(project)) == {*FILES, "linked.py"}


@pytest.mark.parametrize(("name", "value"), [("LARGEST", 20), ("MOST", 5)])
def test_a_folder_beyond_the_bound_is_refused_in_one_line(project, monkeypatch, name, value):
    monkeypatch.setattr(plugin_files, name, value)
    with pytest.raises(UserError, match=r"plugin '.*/project': the folder exceeds .* specify the plugin's \.py file"):
        plugin_files.plugin_files(project)


def test_each_of_several_plugins_with_one_name_has_its_copy(tmp_path):
    paths = [write(tmp_path / folder, {"flat.py": f"WIDTH = {folder!r}\n"}) / "flat.py" for folder in "abc"]
    folders = [write(tmp_path / folder / "flat", {"__init__.py": f"WIDTH = {folder!r}\n"}) for folder in "ab"]
    assert [*copy_names(paths).values()] == ["flat.py", "flat-2.py", "flat-3.py"]
    run = RunDirectory.create(tmp_path / "run", "steps: 1\n", [str(path) for path in [*paths, *folders]])
    run.close()
    copies = {name: (run.path / "plugins" / name).read_text() for name in ("flat.py", "flat-2.py", "flat-3.py")}
    assert list(copies.values()) == ["WIDTH = 'a'\n", "WIDTH = 'b'\n", "WIDTH = 'c'\n"]
    assert (run.path / "plugins" / "flat" / "__init__.py").read_text() == "WIDTH = 'a'\n"
    assert (run.path / "plugins" / "flat-2" / "__init__.py").read_text() == "WIDTH = 'b'\n"
