"""Tests and trains installed plugin distributions: ``python tests/outside.py NAME=FOLDER ...``.

Each is given its own tests, the laws, and a run of two steps, with the interpreter that it was installed beside.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from zygote import Zygote


def ran(named: str, zygote: Zygote) -> bool:
    """Run the commands for one plugin and print them with their output; whether all ended with 0."""
    name, folder = named.split("=", 1)
    settings = ["-c", f"{folder}/pyproject.toml", "-W", "error"]  # the plugin's, not those of this checkout
    if subprocess.run([sys.executable, "-m", "pytest", *settings, f"{folder}/tests"], check=False).returncode:
        return False
    for command in (
        ["clips", "check", name],
        ["train", "--clip", name, "--steps", "2", "--output", f"run-{name}"],
    ):
        done = zygote.run(*command, folder=Path.cwd())
        print(f"rlzoo {' '.join(command)}\n{done.stdout}{done.stderr}exit code {done.returncode}\n", flush=True)
        if done.returncode:
            return False
    return True


if __name__ == "__main__":
    forks = Zygote()
    passed = [ran(named, forks) for named in sys.argv[1:]]
    forks.close()
    sys.exit(0 if passed and all(passed) else 1)
