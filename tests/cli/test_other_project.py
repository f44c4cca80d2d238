"""The other project named `rlzoo` replaces our ``__init__.py``: one line reports it and how to repair the installation."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlzoo.support.extras import how_to_install

ROOT = Path(__file__).resolve().parents[2]
REPAIR = f"pip uninstall rlzoo && {how_to_install(options='--force-reinstall --no-deps ')}"


@pytest.fixture
def package(tmp_path):
    """A copy of rlzoo's folder."""
    return shutil.copytree(ROOT / "rlzoo", tmp_path / "rlzoo", ignore=shutil.ignore_patterns("__pycache__"))


def run(package, *words):
    """Run a command with the copy instead of the checkout, which an editable installation has on its path."""
    program = (
        f"import sys; sys.path[:] = [path for path in sys.path if path != {str(ROOT)!r}]\n"
        f"import rlzoo; assert rlzoo.__path__[0] == {str(package)!r}, rlzoo.__path__\n"
        "from rlzoo.cli.main import entry; entry()"
    )
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=package.parent,
    )


def install_theirs(package):
    """Install their files as pip does: an empty __init__.py replaces ours, and folders are added."""
    (package / "__init__.py").write_text("")
    for folder in ("algorithms", "common"):
        (package / folder).mkdir()
        (package / folder / "__init__.py").write_text("")


def test_an_unmodified_installation_prints_no_warning(package):
    done = run(package, "--version")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("words", [["--version"], ["doctor"], ["train", "--clip", "fspo"]])
def test_an_overwritten_init_is_refused_in_one_line(package, words):
    install_theirs(package)
    done = run(package, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"rlzoo: {package}/__init__.py was replaced or removed by another project, 'rlzoo' on the package index: {REPAIR}\n"
    )


def test_a_removed_init_is_refused_in_one_line(package):
    (package / "__init__.py").unlink()
    done = run(package, "clips", "list")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"rlzoo: {package}/__init__.py was replaced or removed by another project")
