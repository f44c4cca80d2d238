"""`rlzoo runs`: lists and removes run directories."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from rlzoo.cli.console import Plain
from rlzoo.cli.options import AsJson, loading
from rlzoo.cli.tables import report_table
from rlzoo.core.errors import UserError

runs = typer.Typer(help="The runs in a folder.", no_args_is_help=True)


@runs.command("list")
def list_(
    folder: Annotated[Path, typer.Argument(help="Folder that contains runs, at any depth.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List runs, with progress, seconds in steps, scores and size. Also prints the command that resumes each unfinished run."""
    with loading():
        from rlzoo.lab.runs import list_runs
        from rlzoo.measure.report import Row, Table
    rows = list_runs(folder)
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    columns = ["run", "rule", "seed", "state", "step", "s", "score", "MB"]  # 80 columns wide
    console, shown = Plain(), list[Row]()
    for row in rows:
        score = next((row[name] for name in ("accuracy", "held-out reward") if row[name] is not None), row["reward"])
        sizes = [f"{row['step']}/{row['steps']}", f"{row['seconds']:.0f}", score, f"{row['bytes'] / 1e6:,.1f}"]
        shown.append([row["run"], row["rule"], row["seed"], row["state"], *sizes])
    console.print(report_table(Table("", columns, shown)))
    for row in (row for row in rows if row["command"]):
        console.print(f"to resume: {row['command']}")


@runs.command()
def remove(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run directories, such as runs/mine.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Remove runs after confirmation. Links, and files that rlzoo did not write, are kept."""
    with loading():
        from rlzoo.journal.removal import lock_run, remove_run, run_at
    console = Plain()
    with ExitStack() as locks:
        chosen = [lock_run(path, locks) for path in dict.fromkeys(map(run_at, paths))]
        if not (yes or sys.stdin.isatty()):
            raise UserError("nothing was removed: without a terminal, rlzoo cannot ask for confirmation; add --yes")
        if not yes:
            console.print(f"Remove {', '.join(map(str, chosen))}? [y/N]", end=" ")
            if sys.stdin.readline().strip().lower() not in ("y", "yes"):
                console.print("nothing was removed")
                return
        for run in chosen:
            kept = remove_run(run)
            more = ", ..." if len(kept) > 5 else ""
            console.print(f"removed {run}" + bool(kept) * f"; kept what rlzoo did not write: {', '.join(kept[:5])}{more}")
