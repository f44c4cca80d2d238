"""Validates rlzoo on this machine's GPUs and writes one JSON file and one page.

    python -m examples.gpu                          # everything, at most 8 minutes for each of four parts
    python -m examples.gpu --only correctness
    python -m examples.gpu --device cpu --quick     # everything at a small scale, to check that it runs

If the command is interrupted or a part reaches its time limit, run the command again to continue. Finished rows are kept. The
exit code is 1 if a check failed or was not run. If a case needs something that the machine lacks, its row says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

from examples.gpu import rows as records
from examples.gpu.rows import DONE, Case, Outcome, Row, Status
from examples.gpu.worker import PARTS, cases

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "deepspeed",
    "trl",
    "vllm",
    "peft",
    "flash_attn",
    "rlzoo-llm",
)


def make_findable(folder: Path) -> None:
    """Make the plugins discoverable when rlzoo is not installed and there is only this checkout.

    The entry points of pyproject.toml are written to the metadata of a distribution in ``folder``, which is added to
    PYTHONPATH.
    """
    paths = [str(ROOT), str(ROOT / "plugins")]
    try:
        metadata.distribution("rlzoo-llm")
    except metadata.PackageNotFoundError:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        own = folder / f"rlzoo_llm-{project['version']}.dist-info"
        own.mkdir(parents=True)
        head = f"Metadata-Version: 2.1\nName: rlzoo-llm\nVersion: {project['version']}\n"
        (own / "METADATA").write_text(head, encoding="utf-8")
        points = (f"{name} = {module}" for name, module in project["entry-points"]["rlzoo"].items())
        (own / "entry_points.txt").write_text("\n".join(["[rlzoo]", *points, ""]), encoding="utf-8")
        paths.append(str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])


def machine(device: str) -> dict[str, Any]:
    """Return the properties of the machine that affect the numbers."""
    import torch

    from examples.bench.roofline import processor

    found: dict[str, Any] = {"processor": processor(), "cores": os.cpu_count(), "python": platform.python_version()}
    if device == "cuda":
        count = torch.cuda.device_count()
        found["gpus"] = [torch.cuda.get_device_name(number) for number in range(count)]
        found |= {"cuda": torch.version.cuda, "tf32": torch.backends.cuda.matmul.allow_tf32}
    there = {distribution.metadata["Name"].lower().replace("_", "-") for distribution in metadata.distributions()}
    found["packages"] = {name: metadata.version(name) for name in PACKAGES if name.replace("_", "-") in there}
    return found


def run_part(part: str, options: argparse.Namespace, report: dict[str, Any]) -> None:
    """Run the unfinished cases of a part. If the process ends or hangs, only the current case fails."""
    try:
        listed = cases(part)
    except ImportError as error:  # a library that rlzoo requires, or rlzoo itself, is missing
        whole = Case(part, "the whole part", "it starts", lambda _: Outcome(""))
        replace_row(report, row_of(part, whole, "failed", str(error), options), [whole])
        save(report, options)
        return
    recover(part, listed, report, options)
    before = {row.name: row for row in report["rows"] if row.part == part}
    pending = [case for case in listed if case.name not in before or before[case.name].status not in DONE]
    if part not in options.only:
        pending = [case for case in pending if case.name in options.only]
    # run the case that used up the part's time in the previous call last
    pending.sort(key=lambda case: case.name in before and before[case.name].status == "stopped")
    end = time.monotonic() + 60 * options.minutes
    while pending and time.monotonic() < end:
        try:
            done, begun, code = run_worker(part, pending, options, end)
        except SystemExit:  # the command was killed
            recover(part, listed, report, options)
            raise
        for row in done:
            replace_row(report, row, listed)
        pending = [case for case in pending if case.name not in {row.name for row in done}]
        if begun is not None:
            case = next(case for case in pending if case.name == begun)
            pending.remove(case)
            over = f"not finished within the part's {options.minutes:g} minutes"
            how = f"the process ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
            status, found = ("stopped", over) if time.monotonic() >= end else ("failed", f"{how}; see {part}.log")
            replace_row(report, row_of(part, case, status, found, options), listed)
        elif code and not done:  # the part cannot even be imported
            for case in pending:
                replace_row(report, row_of(part, case, "failed", f"the part cannot start; see {part}.log", options), listed)
            pending = []
        save(report, options)
    (options.output / f"{part}.rows").unlink(missing_ok=True)
    for case in pending:
        replace_row(
            report, row_of(part, case, "not run", "the part reached its time limit; run the command again", options), listed
        )
    save(report, options)


def recover(part: str, listed: list[Case], report: dict[str, Any], options: argparse.Namespace) -> None:
    """Add to the report the rows that the worker of a killed command had finished."""
    for line in read_lines(options.output / f"{part}.rows"):
        if "begun" not in line:
            replace_row(report, Row(**line), listed)
    save(report, options)


def save(report: dict[str, Any], options: argparse.Namespace) -> None:
    """Write the rows so far to gpu.json and the page with these rows to gpu.md."""
    from examples.gpu.page import page

    records.write(options.output / "gpu.json", report)
    (options.output / "gpu.md").write_text(page(report), encoding="utf-8")


def row_of(part: str, case: Case, status: Status, found: str, options: argparse.Namespace) -> Row:
    """Return a row for a case that has no outcome."""
    return Row(part, case.name, case.about, case.allowed, status, found, options.mark)


def replace_row(report: dict[str, Any], row: Row, listed: list[Case]) -> None:
    """Put a row into the report, keeping the rows in the order of parts and cases."""
    kept = [each for each in report["rows"] if (each.part, each.name) != (row.part, row.name)]
    order = {case.name: number for number, case in enumerate(listed)}
    parts = list(PARTS)
    report["rows"] = sorted([*kept, row], key=lambda each: (parts.index(each.part), order.get(each.name, 0)))


def run_worker(part: str, pending: list[Case], options: argparse.Namespace, end: float) -> tuple[list[Row], str | None, int]:
    """Run cases in one process until it ends or time is up. Return the rows, any unfinished case, and the exit code."""
    file = options.output / f"{part}.rows"
    file.unlink(missing_ok=True)
    names = ",".join(case.name for case in pending)
    command = [sys.executable, "-m", "examples.gpu.worker", part, names, str(file), "--device", options.device]
    command += ["--models", str(options.models), *(["--quick"] if options.quick else [])]
    seen = 0
    with (options.output / f"{part}.log").open("a") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None and time.monotonic() < end:
                time.sleep(0.2)
                seen = show(file, seen)
        finally:
            end_all(process)
            code = process.wait()
    show(file, seen)
    lines = read_lines(file)
    done = [Row(**line) for line in lines if "begun" not in line]
    begun = [line["begun"] for line in lines if "begun" in line]
    open_case = begun[-1] if len(begun) > len(done) else None
    return done, open_case, code


def end_all(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all processes that it has started, including those in new sessions, such as torchrun's."""
    import psutil

    if process.poll() is not None:
        return
    for each in [*psutil.Process(process.pid).children(recursive=True), process]:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            each.kill()


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the lines that a worker has written so far."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def show(file: Path, seen: int) -> int:
    """Print the new rows and return the number of lines that were read."""
    lines = read_lines(file)
    for line in lines[seen:]:
        if "begun" not in line:
            print(f"{line['status']:>8}  {line['name']}: {line['found']}  [{line['seconds']:.0f} s]", flush=True)
    return len(lines)


def parts_of(only: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """Return the named parts and the parts that contain the named rows."""
    rows: dict[str, str] = {}
    if any(name not in PARTS for name in only):
        rows = {case.name: part for part in PARTS for case in cases(part)}
    if wrong := [name for name in only if name not in (*PARTS, *rows)]:
        parser.error(
            f"--only: there is no part or row {wrong[0]!r} (parts: {', '.join(PARTS)}; docs/reference/gpu.md lists the rows)"
        )
    named = {rows.get(name, name) for name in only}
    return [part for part in PARTS if part in named]


def unproven(report: dict[str, Any]) -> list[Row]:
    """Return the checks that failed or were not run. A measurement cannot make the command fail."""
    return [row for row in report["rows"] if row.allowed and row.status in ("failed", "stopped", "not run")]


def main() -> int:
    """Run the parts, write the report after each, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), help="device to test (default: cuda; it is an error if there is no GPU)"
    )
    parser.add_argument("--quick", action="store_true", help="use small models and few tokens")
    parser.add_argument("--only", help=f"comma-separated parts or names of rows (default: {','.join(PARTS)})")
    parser.add_argument("--minutes", type=float, default=8.0, help="time limit of each part (default: %(default)g)")
    parser.add_argument("--output", type=Path, help="folder for gpu.json and gpu.md (default: runs/gpu-DEVICE[-quick])")
    options = parser.parse_args()
    options.only = list(PARTS) if options.only is None else options.only.split(",")
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    options.device = options.device or "cuda"
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU; check nvidia-smi and the build of torch, or use --device cpu --quick")
    name = f"gpu-{options.device}{'-quick' if options.quick else ''}"
    options.output = (options.output or ROOT / "runs" / name).resolve()
    options.output.mkdir(parents=True, exist_ok=True)
    options.models = Path(tempfile.gettempdir()) / "rlzoo-bench-models"
    options.mark = records.Setting(options.device, options.quick, options.models).mark
    report = records.read(options.output / "gpu.json")
    if report["rows"] and report["mark"] != options.mark:
        parser.error(
            f"--output {options.output}: contains rows for {report['mark']!r}, not {options.mark!r}; use another folder"
        )
    if options.quick and options.device == "cpu":
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are so small that a second thread only slows them down
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exiting also stops the workers
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "MLFLOW_TRACKING_URI": ""}
    with tempfile.TemporaryDirectory(prefix="rlzoo-gpu-") as folder:
        make_findable(Path(folder))
        report |= {"mark": options.mark, "date": date.today().isoformat(), "machine": machine(options.device)}
        for part in parts_of(options.only, parser):
            print(f"== {part}", flush=True)
            run_part(part, options, report)
    failed = unproven(report)
    print(f"{options.output / 'gpu.md'}: {len(report['rows'])} rows; checks that failed or were not run: {len(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
