"""The race of docs/explanation/which-rule-wins.md: every policy at one clip fraction, with a learning rate that suits it.

``python examples/lab/race.py FOLDER``: for every policy and learning rate, ``rlzoo calibrate`` finds the width that clips a
tenth of the responses, and one run is made with it, on a seed kept for that; the learning rate with the highest reward over the
last quarter of the steps is written to ``FOLDER/chosen.yaml``; then ``rlzoo sweep`` runs every policy with five other seeds.
What is finished in FOLDER is not done again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

import yaml

WITH_WIDTH = (
    *("fspo", "gspo", "rloo", "grpo", "luspo", "gmpo", "cispo"),
    *("cfpo", "dcpo", "dppo-tv", "dppo-kl", "m2po", "opsm", "clip-cov"),
)
WITHOUT = ("fspo-adaptive", "gpg", "kl-cov", "opmd", "topr", "vespo")  # told the share, or nothing to match it with
LEARNING_RATES = ("1.5e-4", "3e-4", "6e-4")
TUNING_SEED = "101"
JOBS = os.cpu_count() or 1


def rlzoo(*arguments: object) -> int:
    """Run a command on one thread, its output in a log; its exit code."""
    words = [str(argument) for argument in arguments]
    log = Path(words[words.index("--output") + 1]).with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        command = [sys.executable, "-m", "rlzoo", *words]
        return subprocess.run(
            command, stdout=file, stderr=file, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
        ).returncode


def tune(folder: Path, clip: str) -> None:
    """Calibrate one policy for every learning rate, and train it once with each."""
    before: tuple[str, Path] | None = None
    for lr in LEARNING_RATES:
        width = folder / "calibrated" / lr / f"{clip}.yaml"
        if clip in WITH_WIDTH and not width.exists():
            width.parent.mkdir(parents=True, exist_ok=True)
            start = [] if before is None else ["--config", in_proportion(*before, lr)]
            settings = ["--set", f"learner.lr={lr}", "--seed", TUNING_SEED, "--steps", 20, "--pilots", 8]
            rlzoo("calibrate", "--clip", clip, *start, *settings, "--output", width)
        config = ["--config", width] if clip in WITH_WIDTH else []
        before = (lr, width)
        run = folder / "tuned" / lr / clip
        if not (run / "summary.json").exists():
            settings = ["--set", f"learner.lr={lr}", "--set", "eval.num_problems=0", "--set", "tracking.mlflow=false"]
            rlzoo("train", "--clip", clip, *config, *settings, "--seed", TUNING_SEED, "--output", run)
        print(clip, lr, flush=True)


def in_proportion(lr: str, width: Path, new_lr: str) -> Path:
    """A config with the widths of one learning rate scaled to another: the model moves that much further."""
    clip = yaml.safe_load(width.read_text())["clip"]
    scaled = {key: value if key == "name" else value * float(new_lr) / float(lr) for key, value in clip.items()}
    file = width.parent.parent / new_lr / f"{clip['name']}.start"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump({"clip": scaled}))
    return file


def reward(run: Path) -> float:
    """Mean reward over the last quarter of the steps."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return fmean(row["reward/mean"] for row in rows if row["step"] > 0.75 * rows[-1]["step"])


def choose(folder: Path) -> Path:
    """Write the learning rate and the width of every policy that did best on the tuning seed."""
    chosen = {}
    for clip in (*WITH_WIDTH, *WITHOUT):
        rewards = {lr: reward(folder / "tuned" / lr / clip) for lr in LEARNING_RATES}
        best = max(rewards, key=lambda lr: rewards[lr])
        chosen[clip] = {"learner": {"lr": float(best)}}
        if clip in WITH_WIDTH:
            found = yaml.safe_load((folder / "calibrated" / best / f"{clip}.yaml").read_text())["clip"]
            chosen[clip]["clip"] = {key: value for key, value in found.items() if key != "name"}
        print(clip, best, {lr: round(value, 3) for lr, value in rewards.items()})
    file = folder / "chosen.yaml"
    file.write_text(yaml.safe_dump({"per_clip": chosen}, sort_keys=False))
    return file


def main() -> None:
    """Tune, choose, race."""
    folder = Path(sys.argv[1])
    with ThreadPoolExecutor(JOBS) as pool:
        list(pool.map(lambda clip: tune(folder, clip), (*WITH_WIDTH, *WITHOUT)))
    config = choose(folder)
    names = ",".join((*WITH_WIDTH, *WITHOUT))
    sys.exit(rlzoo("sweep", "--clip", names, "--seeds", 5, "--config", config, "--output", folder / "race"))


if __name__ == "__main__":
    main()
