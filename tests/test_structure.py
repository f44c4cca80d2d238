"""The structure of the package: no cycles among its modules, and folders that can be removed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_no_module_imports_itself_through_others():
    graph = grimp.build_graph("rlzoo", cache_dir=None)  # including imports for type checkers
    above = {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
    while free := {module for module, imported in above.items() if not imported & above.keys()}:
        above = {module: imported for module, imported in above.items() if module not in free}
    assert not above, f"a cycle among {sorted(above)}"


@pytest.mark.long
def test_a_rule_is_checked_with_only_the_core_and_the_laws(tmp_path):
    package, plugins = tmp_path / "rlzoo", tmp_path / "rlzoo_fspo"
    for folder in ("core", "testing"):
        shutil.copytree(ROOT / "rlzoo" / folder, package / folder)
    shutil.copy(ROOT / "rlzoo" / "__init__.py", package)
    shutil.copytree(ROOT / "plugins" / "rlzoo_fspo", plugins)
    program = (
        "import rlzoo; from rlzoo.testing import check; from rlzoo_fspo import FSPO;"
        "assert 'tmp' in rlzoo.__file__, rlzoo.__file__;"
        "print({outcome.status for outcome in check(FSPO())})"
    )
    environment = {**os.environ, "PYTHONPATH": ".", "PYTHONSAFEPATH": ""}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "{'pass'}\n"


@pytest.mark.long
def test_everything_runs_without_the_cpu_optimizations(tmp_path):
    copy = shutil.copytree(ROOT / "rlzoo", tmp_path / "rlzoo", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("plugins", "configs"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    shutil.rmtree(copy / "models" / "fast_cpu")
    program = "import rlzoo, sys; from rlzoo.cli.main import main; assert 'tmp' in rlzoo.__file__, rlzoo.__file__; main()"
    settings = ["eval.num_problems=0", "tracking.mlflow=false", "rollout.max_new_tokens=16"]
    words = ["train", "--steps", "1", "--output", "run", *(word for setting in settings for word in ("--set", setting))]
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 2
