"""Tests and trains installed plugin distributions: ``python tests/outside.py REPORT NAME=FOLDER ...``.

Each runs its own tests, the laws, and a run of two steps, with the interpreter of its environment. The report lists what pip
would install with them into an empty environment; it must not contain the other project named `rlzoo`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from zygote import Zygote

FEW = ["--set=rollout.num_prompts=4", "--set=eval.num_problems=4", "--set=tracking.mlflow=false"]


def check_names(report: Path, plugins: list[str]) -> None:
    """Check that only the given wheel satisfies the plugins' requirements, and that `rlzoo` comes from no other source."""
    found = {each["metadata"]["name"]: each["download_info"]["url"] for each in json.loads(report.read_text())["install"]}
    assert {"rlzoo-llm", "torch", *(f"rlzoo-{plugin}" for plugin in plugins)} <= found.keys(), sorted(found)
    assert "rlzoo" not in found, found["rlzoo"]
    assert found["rlzoo-llm"].startswith("file:"), found["rlzoo-llm"]
    assert metadata.version("rlzoo-llm")
    assert not [each for each in metadata.distributions() if each.name.lower() == "rlzoo"], "the other project is installed"
    providers = set(metadata.packages_distributions()["rlzoo"])
    assert providers == {"rlzoo-llm"}, providers
    print(f"{len(found)} distributions for an empty environment, of which rlzoo-llm alone has the package rlzoo")


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
    file, *arguments = sys.argv[1:]
    check_names(Path(file), [named.partition("=")[0] for named in arguments])
    forks = Zygote()
    passed = [ran(named, forks) for named in arguments]
    forks.close()
    sys.exit(0 if passed and all(passed) else 1)
