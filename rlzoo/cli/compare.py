"""`rlzoo compare`: which policy did better, and how surely, as tables, JSON and an HTML report."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from rich.table import Table

from rlzoo.cli.display import Plain, counted
from rlzoo.cli.pages import check_page, write_page
from rlzoo.cli.tables import interval, number, signed
from rlzoo.errors import UserError
from rlzoo.journal.tracking.record import run_id_of
from rlzoo.journal.tracking.store import common_parent, log_artifact
from rlzoo.lab.races import SCORES, Race, race

MANY = 4  # contenders; of more, only the pairs with the best are shown


def compare(
    paths: Sequence[Path],
    *,
    as_json: bool,
    report: Path | None,
    match: float | None = 0.1,
    skip_steps: int = 0,
    is_quiet: bool = False,
) -> None:
    """Compare runs, show what came of it, and add the report to the sweep's run in MLflow if they have one.

    Raises:
        UserError: there is nothing to compare, or nowhere to put the report.
    """
    page = report or Path(os.path.commonpath([path.resolve() for path in paths])) / "compare.html"
    if report is not None and (report.is_dir() or not report.parent.is_dir()):
        raise UserError(f"--report {str(report)!r}: give the name of a file, in a folder that exists")
    if report is not None or not as_json:
        check_page(page)
    console = Plain()
    with counted(is_quiet=is_quiet) as told:
        result = race(paths, match=match, skip_steps=skip_steps, told=told)
    if as_json:
        print(json.dumps(result.as_dict(), indent=2))
    else:
        _print(console, result)
    if report is not None or not as_json:
        from rlzoo.lab.race_report import race_report

        write_page(page, race_report(result))
        messages = Plain(stderr=as_json)
        messages.print(f"report {os.path.relpath(page)}")
        ids = [run_id_of(run.path) for contender in result.contenders for run in contender.runs]
        parent = common_parent([run_id for run_id in ids if run_id])
        if parent:
            log_artifact(parent, page)


def _print(console: Plain, result: Race) -> None:
    console.print(f"score: {SCORES[result.metric]}")
    table = Table(box=None, pad_edge=False)
    matched = "" if result.match is None else f"lre@{result.match:g}"
    for column in ("policy", "seeds", "mean", "gain", "IQM", "95 %", "clip", matched, "noise", "len", "s"):
        table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=column != "policy")
    for contender in result.contenders:
        errors = [profile.lre_max for profile in contender.matched if profile.lre_max is not None]
        noise = [profile.lre_noise for profile in contender.matched if profile.lre_noise is not None]
        table.add_row(
            contender.label,
            str(contender.score.num_seeds),
            number(contender.score.mean),
            signed(contender.gain),
            number(contender.score.iqm),
            interval(contender.score.iqm_interval),
            number(contender.mean("clip/fraction")),
            number(fmean(errors) if errors else None),
            number(fmean(noise) if noise else None),
            f"{contender.mean('response/length_mean', 0.25) or 0:.0f}",
            f"{fmean(run.seconds for run in contender.runs):.0f}",
        )
    console.print(table)
    best = result.contenders[0].label
    shown = [pair for pair in result.pairs if len(result.contenders) <= MANY or best in (pair.first, pair.second)]
    pairs = Table(box=None, pad_edge=False)
    for column in ("pair", "difference", "95 %", "P", "verdict"):
        pairs.add_column(column, justify="left" if column in ("pair", "verdict") else "right", no_wrap=column in ("95 %", "P"))
    for pair in shown:
        pairs.add_row(
            f"{pair.first} - {pair.second}",
            signed(pair.mean),
            interval(pair.interval),
            f"{pair.probability_of_improvement:.2f}",
            pair.verdict,
        )
    if shown:
        console.print(pairs)
    for note in result.notes:
        console.print(note)
