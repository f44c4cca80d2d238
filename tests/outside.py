"""Tests and trains installed plugin distributions, two at a time: ``python -m tests.outside NAME=FOLDER ...``.

Each is given its own tests, the laws, and a run of two steps, with the interpreter and the ``rlzoo`` command that it was
installed beside.
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

RLZOO = str(Path(sys.executable).with_name("rlzoo"))


def ran(named: str) -> bool:
    """Run the commands for one plugin and print them with their output; whether all ended with 0."""
    name, folder = named.split("=", 1)
    settings = ["-c", f"{folder}/pyproject.toml", "-W", "error"]  # the plugin's, not those of this checkout
    for command in (
        [sys.executable, "-m", "pytest", *settings, f"{folder}/tests"],
        [RLZOO, "clips", "check", name],
        [RLZOO, "train", "--clip", name, "--steps", "2", "--output", f"run-{name}"],
    ):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        print(f"{' '.join(command)}\n{done.stdout}exit code {done.returncode}\n", flush=True)
        if done.returncode:
            return False
    return True


if __name__ == "__main__":
    with ThreadPoolExecutor(2) as pool:
        sys.exit(0 if all(list(pool.map(ran, sys.argv[1:]))) else 1)
