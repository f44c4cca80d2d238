"""Compares rules for episodes at equal clip fractions on the game `guess`, for docs/explanation/fair-by-turns.md.

``python examples/lab/race_turns.py FOLDER`` first runs ``rlzoo calibrate`` with a separate seed to find the width at which
each policy clips a tenth of the responses. Then ``rlzoo sweep`` runs every policy with five other seeds. Policies that
accept per-token advantages are also run with the estimator `gigpo`. Finished parts in FOLDER are not repeated.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import yaml

BY_RESPONSE = ("fspo", "gspo", "rloo")
BY_TURN_OR_TOKEN = ("fspo-turn", "turn-ratio", "grpo")
TUNING_SEED = "101"
SEEDS = "0,1,2,3,4"


def rlzoo(*arguments: object) -> int:
    """Run a command on one thread and return its exit code."""
    command = [sys.executable, "-m", "rlzoo", *map(str, arguments), "--quiet"]
    return subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False).returncode


def main(folder: Path) -> None:
    """Calibrate the widths and run the sweeps."""
    widths: dict[str, object] = {}
    for clip in (*BY_RESPONSE, *BY_TURN_OR_TOKEN):
        file = folder / "widths" / f"{clip}.yaml"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            # exit code 1 means that no pilot came close to the target, so the widths of the nearest pilot were written
            rlzoo("calibrate", "--config", "guess", "--clip", clip, "--seed", TUNING_SEED, "--steps", 20, "--output", file)
        found = yaml.safe_load(file.read_text())["clip"]
        widths[clip] = {"clip": {name: value for name, value in found.items() if name != "name"}}
    chosen = folder / "widths.yaml"
    chosen.write_text(yaml.safe_dump({"per_clip": widths}))
    for name, clips, settings in (
        ("group", (*BY_RESPONSE, *BY_TURN_OR_TOKEN), []),
        ("gigpo", BY_TURN_OR_TOKEN, ["--set", "clip.advantage=gigpo"]),
    ):
        rule = ("--clip", ",".join(clips), "--seeds", SEEDS)
        if rlzoo("sweep", "--config", "guess", "--config", chosen, *rule, *settings, "--output", folder / name):
            raise SystemExit(f"the sweep in {folder / name} is not complete; rerun this script to resume it")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
