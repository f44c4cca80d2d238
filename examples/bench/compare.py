"""Runs each case with both libraries, alternating between them, and writes the measurements.

python -m examples.bench.compare --json bench.json
python -m examples.bench.compare --quick --json bench.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import torch

from examples.bench import overhead, roofline
from examples.bench.cases import CASES, GROUP, QUICK, Case

PHASES = ("rollout", "learner", "step")
ALONE = ("growth", "overhead")
BESIDE = ("equal-off-policy",)
ROOT = Path(__file__).parents[2]


class Worker:
    """A process that runs a step of a case on request.

    Example:
        ``worker.step()["rollout"]`` is a time in seconds.
    """

    def __init__(self, library: str, case: str, folder: Path, *overrides: str) -> None:
        command = [sys.executable, "-m", f"examples.bench.{library}_worker", case, str(folder), *overrides]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, cwd=ROOT, env=environment
        )
        self._answer()

    def step(self) -> dict[str, Any]:
        """Return the measurements of one step."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            sys.exit(f"{' '.join(self.process.args)} ended:\n{self.log.read()[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


def compare(case: Case, folder: Path, pairs: int) -> list[dict[str, Any]]:
    """Return one row per phase of a case. The machine's rate is measured before every pair of steps."""
    dtype = torch.bfloat16 if case.autocast == "bfloat16" else torch.float32
    rates: list[float] = []
    seen: dict[str, list[dict[str, Any]]] = {"rlzoo": [], "trl": []}
    with Worker("rlzoo", case.name, folder) as ours, Worker("trl", case.name, folder) as theirs:
        workers = {"rlzoo": ours, "trl": theirs}
        for worker in workers.values():
            worker.step()  # the first step allocates memory
        for pair in range(pairs):
            rates.append(roofline.product_rate(dtype))
            for library in sorted(workers, reverse=bool(pair % 2)):
                seen[library].append(workers[library].step())
                last = seen[library][-1]
                print(
                    f"{case.name} {pair + 1}/{pairs} {library}: " + ", ".join(f"{p} {last[p]:.3f} s" for p in PHASES),
                    flush=True,
                )
    flops = roofline.step_flops(case, case.model(folder), *lengths_of(case, folder, seen["rlzoo"][-1]["tokens"]))
    return [row(case, phase, seen, flops[phase], rates) for phase in PHASES]


def row(case: Case, phase: str, seen: dict[str, list[dict[str, Any]]], flops: float, rates: list[float]) -> dict[str, Any]:
    """Return the results of one phase of a case."""
    ratios = [theirs[phase] / ours[phase] for ours, theirs in zip(seen["rlzoo"], seen["trl"], strict=True)]
    seconds = {library: statistics.median(step[phase] for step in steps) for library, steps in seen.items()}
    bound = flops / statistics.median(rates)
    return {
        "case": case.name,
        "phase": phase,
        "ratio_median": statistics.median(ratios),
        "pairs": len(ratios),
        "ratios": ratios,
        "rlzoo_seconds": seconds["rlzoo"],
        "trl_seconds": seconds["trl"],
        "rlzoo_tokens": [step["tokens"] for step in seen["rlzoo"]],
        "trl_tokens": [step["tokens"] for step in seen["trl"]],
        "rlzoo_learner_peak_bytes": max(step["learner_peak"] for step in seen["rlzoo"]),
        "trl_learner_peak_bytes": max(step["learner_peak"] for step in seen["trl"]),
        "matmul_rates": rates,
        "bound_seconds": bound,
        "rlzoo_share_of_bound": bound / seconds["rlzoo"],
        "trl_share_of_bound": bound / seconds["trl"],
    }


def lengths_of(case: Case, folder: Path, tokens: int) -> tuple[list[int], list[int]]:
    """Return the number of tokens in each prompt and response. Except in ``long-tail``, responses have the mean length."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(case.model(folder))
    prompts = [len(tokenizer(case.prompt(index))["input_ids"]) for index in range(case.num_prompts)]
    if case.name == "long-tail":
        return prompts, [256 if index < GROUP else 32 for index in range(case.completions)]
    return prompts, [round(tokens / case.completions)] * case.completions


def growth(folder: Path) -> list[dict[str, Any]]:
    """Measure rlzoo alone with the embedded model, varying either the number of responses or their length."""
    rows = []
    axes = [("completions", number, 128) for number in (32, 64, 128, 256, 512)]
    axes += [("length", 64, length) for length in (64, 128, 256, 512, 1024)]
    for axis, number, length in axes:
        overrides = [f"rollout.num_prompts={number // GROUP}", f"rollout.max_new_tokens={length}", "rollout.batch_size=512"]
        with Worker("rlzoo", "embedded", folder, *overrides) as worker:
            worker.step()
            steps = [worker.step() for _ in range(5)]
        tokens = number * length
        per_token = {phase: statistics.median(step[phase] for step in steps) / tokens * 1e6 for phase in PHASES}
        peak = max(step["learner_peak"] for step in steps)
        rows.append({"axis": axis, "completions": number, "length": length, "microseconds_per_token": per_token, "peak": peak})
        print(f"growth in {axis}, {number} x {length}: {per_token['step']:.1f} microseconds per token", flush=True)
    return rows


def measure(name: str, folder: Path, pairs: int, report: dict[str, Any]) -> None:
    """Add one case or one measurement of rlzoo alone to the report."""
    if name == "growth":
        report["growth"] = growth(folder)
    elif name == "overhead":
        report["start_seconds"] = overhead.seconds_to_the_first_step()
        report["beside"] = {"the default run": overhead.beside_the_model()}
        report["beside"] |= {case: overhead.beside_the_model(case) for case in BESIDE}
    else:
        rows = compare(CASES[name], folder, pairs)
        report["rows"] = [row for row in report["rows"] if row["case"] != name] + rows


def main() -> None:
    """Run the requested measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"run only {' and '.join(QUICK)}, with three pairs")
    parser.add_argument(
        "--case", action="append", choices=(*CASES, *ALONE), help="run only these cases, and add them to an existing file"
    )
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--json", type=Path, default=Path("bench.json"))
    options = parser.parse_args()
    packages = {name: version(name) for name in ("torch", "transformers", "trl", "rlzoo-llm")}
    report: dict[str, Any] = {
        "processor": roofline.processor(),
        "date": date.today().isoformat(),
        "rows": [],
        "python": platform.python_version(),
        "packages": packages,
    }
    if options.case and options.json.exists():
        report |= json.loads(options.json.read_text(encoding="utf-8"))
    if "machine" not in report:
        report["machine"] = roofline.machine()
    print(f"matrix products: {report['machine']['matmul_float32'] / 1e9:.0f} GFLOP/s in float32", flush=True)
    folder = Path(tempfile.gettempdir()) / "rlzoo-bench-models"
    for name in options.case or (QUICK if options.quick else (*CASES, *ALONE)):
        pairs = options.pairs or (3 if options.quick or name in ALONE else CASES[name].pairs)
        measure(name, folder, pairs, report)
        options.json.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
