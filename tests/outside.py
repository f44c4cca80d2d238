"""Tests and trains installed plugin distributions: ``python tests/outside.py NAME=FOLDER ...``.

Each runs its own tests, the laws, and a run of two steps, with the interpreter of its environment. The distributions that they
require, recursively, must not include the other project named `rlzoo`.
"""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

from bare import closure
from zygote import Zygote

FEW = ["--set=rollout.num_prompts=4", "--set=eval.num_problems=4", "--set=tracking.mlflow=false"]


def check_names(plugins: list[str]) -> None:
    """Check that the plugins require rlzoo-llm, and that `rlzoo` comes from no other distribution."""
    for plugin in plugins:
        required = closure(f"rlzoo-{plugin}")
        assert {"rlzoo-llm", "torch"} <= required, sorted(required)
        assert "rlzoo" not in required, sorted(required)
        print(f"rlzoo-{plugin} requires {len(required) - 1} distributions, of which rlzoo-llm alone has the package rlzoo")
    assert metadata.version("rlzoo-llm")
    assert not [each for each in metadata.distributions() if each.name.lower() == "rlzoo"], "the other project is installed"
    providers = set(metadata.packages_distributions()["rlzoo"])
    assert providers == {"rlzoo-llm"}, providers


def ran(named: str, zygote: Zygote) -> bool:
    """Run the commands for one plugin and print them with their output; returns whether all exited with 0."""
    name, folder = named.split("=", 1)
    settings = ["-c", f"{folder}/pyproject.toml", "-W", "error"]  # of the plugin, not of this checkout
    if subprocess.run([sys.executable, "-m", "pytest", *settings, f"{folder}/tests"], check=False).returncode:
        return False
    for command in (
        ["clips", "check", name],
        ["train", "--clip", name, "--steps", "2", "--output", f"run-{name}", *FEW],
    ):
        done = zygote.run(*command, folder=Path.cwd())
        print(f"rlzoo {' '.join(command)}\n{done.stdout}{done.stderr}exit code {done.returncode}\n", flush=True)
        if done.returncode:
            return False
    return True


if __name__ == "__main__":
    arguments = sys.argv[1:]
    check_names([named.partition("=")[0] for named in arguments])
    forks = Zygote()
    passed = [ran(named, forks) for named in arguments]
    forks.close()
    sys.exit(0 if passed and all(passed) else 1)
