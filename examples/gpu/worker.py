"""Runs cases of one part in this process and appends each row to a file: ``python -m examples.gpu.worker``."""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import time
import traceback
from dataclasses import asdict
from pathlib import Path

from examples.gpu.rows import AbsentError, Case, Row, Setting

PARTS = {"correctness": "correctness", "speed": "speed", "trl": "beside_trl", "several": "several"}
"""The module of each part."""


def cases(part: str) -> list[Case]:
    """Return the cases of a part in the order in which they run."""
    found: list[Case] = importlib.import_module(f"examples.gpu.{PARTS[part]}").CASES
    return found


def run_case(part: str, case: Case, setting: Setting) -> Row:
    """Run a case and return its row. If the case raises an exception, the row contains the message."""
    import torch

    from rlzoo.core.errors import UserError

    started, values, status = time.perf_counter(), {}, "failed"
    try:
        outcome = case.run(setting)
    except AbsentError as error:
        status, found = "absent", str(error)
    except UserError as error:
        status, found = ("absent" if "pip install" in str(error) else "failed"), str(error)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        lines = [line for line in str(error).splitlines() if line.strip()]
        found = f"{type(error).__name__}: {lines[-1] if lines else ''}"[:300]
    else:
        status = "measured" if outcome.passed is None else "passed" if outcome.passed else "failed"
        found, values = outcome.found, outcome.values
    seconds = time.perf_counter() - started
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return Row(part, case.name, case.about, case.allowed, status, found, setting.mark, round(seconds, 1), values)


def main() -> None:
    """Run the named cases one after the other. Before each case, write a line with its name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("names")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--models", type=Path, required=True)
    options = parser.parse_args()
    setting = Setting(options.device, options.quick, options.models)
    known = {case.name: case for case in cases(options.part)}
    for name in options.names.split(","):
        for line in ({"begun": name}, None):
            row = line or asdict(run_case(options.part, known[name], setting))
            with options.rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
