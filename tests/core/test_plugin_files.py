"""The plugin files that a run keeps: of a package everything but caches and outputs, and separate copies for equal names."""

import pytest

from rlzoo.core.plugin_files import copy_names, plugin_files
from rlzoo.journal.run_directory import RunDirectory

FILES = {
    "__init__.py": "",
    "rule.py": "WIDTH = 1\n",
    "data/table.json": "{}",
    "inner/__init__.py": "",
    "inner/more.py": "MORE = 1\n",
}
SKIPPED = {
    ".git/HEAD": "ref",
    "__pycache__/rule.pyc": "x",
    "inner/__pycache__/more.pyc": "x",
    "mlflow.db": "x",
    "mlruns/0/meta.yaml": "x",
    "runs/one/config.yaml": "x",
    "runs/one/run.json": "{}",
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
def package(tmp_path):
    return write(tmp_path / "package", FILES | SKIPPED)


def files_below(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_run_inside_a_package_copies_the_package_and_nothing_else(package):
    for number in range(3):  # each would be included in the next one's copy
        run = RunDirectory.create(package / f"out-{number}", "steps: 1\n", [str(package)])
        run.close()
        assert files_below(run.path / "plugins" / "package") == set(FILES)


def test_only_the_modules_of_a_plain_folder_belong_to_the_plugin(package):
    (package / "__init__.py").unlink()
    (package / "broken.py").symlink_to(package / "nowhere")
    assert set(plugin_files(package)) == {"rule.py"}


def test_plugins_with_equal_names_have_separate_copies(tmp_path):
    paths = [write(tmp_path / folder, {"flat.py": f"WIDTH = {folder!r}\n"}) / "flat.py" for folder in "abc"]
    folders = [write(tmp_path / folder / "flat", {"__init__.py": f"WIDTH = {folder!r}\n"}) for folder in "ab"]
    assert [*copy_names(paths).values()] == ["flat.py", "flat-2.py", "flat-3.py"]
    run = RunDirectory.create(tmp_path / "run", "steps: 1\n", [str(path) for path in [*paths, *folders]])
    run.close()
    copies = {name: (run.path / "plugins" / name).read_text() for name in ("flat.py", "flat-2.py", "flat-3.py")}
    assert list(copies.values()) == ["WIDTH = 'a'\n", "WIDTH = 'b'\n", "WIDTH = 'c'\n"]
    assert (run.path / "plugins" / "flat" / "__init__.py").read_text() == "WIDTH = 'a'\n"
    assert (run.path / "plugins" / "flat-2" / "__init__.py").read_text() == "WIDTH = 'b'\n"
