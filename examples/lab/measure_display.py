"""Measures the CPU time of the display of `rlzoo train` as a share of the duration of the steps that it shows.

python examples/lab/measure_display.py runs/mine

The script draws to a separate 80-column terminal at the pace of the run and does nothing else. The cost is the CPU time of the
whole process minus the CPU time of the same loop without a display.
"""

import contextlib
import os
import sys
import threading
import time
from pathlib import Path

from rlzoo.cli.console import Plain
from rlzoo.cli.progress import shown
from rlzoo.journal.run_directory import read_metrics

SECONDS = 20.0  # duration of the measurement

Row = dict[str, float]


def spent(rows: list[Row], pause: float, *, is_quiet: bool) -> tuple[float, float]:
    """Return the CPU time and the duration of a loop that repeatedly shows the rows, or shows nothing."""
    started, begun, step = time.perf_counter(), time.process_time(), 0
    with shown(Plain(), "a run", 10**6, is_quiet=is_quiet) as view:
        while time.perf_counter() - started < SECONDS:
            view.step(step, rows[step % len(rows)])
            step += 1
            time.sleep(pause)
        return time.process_time() - begun, time.perf_counter() - started


def read(terminal: int) -> None:
    """Read the output of a terminal as its window would."""
    with contextlib.suppress(OSError):  # this is raised at the end of the stream
        while True:
            os.read(terminal, 65536)


def main() -> None:
    rows = read_metrics(Path(sys.argv[1]) / "metrics.jsonl")
    pause = (rows[-1]["time/clock"] - rows[1]["time/clock"]) / (len(rows) - 2)  # includes evaluation and bookkeeping
    os.environ |= {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    ours, theirs = os.openpty()
    threading.Thread(target=read, args=(ours,), daemon=True).start()
    out = sys.stdout
    with os.fdopen(theirs, "w") as terminal:
        nothing, _ = spent(rows, pause, is_quiet=True)
        sys.stdout = terminal
        cost, seconds = spent(rows, pause, is_quiet=False)
        sys.stdout = out
    share = (cost - nothing) / seconds
    print(f"steps of {pause:.2f} s: {share:.2%} of the time, {1000 * share * pause:.2f} ms of a step")


main()
