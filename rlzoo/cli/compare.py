"""`rlzoo compare`: compares the rules of several runs, prints tables or JSON, and writes an HTML report."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from rlzoo.cli.console import Plain
from rlzoo.cli.options import AsJson, Csv, Latex, MatchBySign, Plugins, Quiet, loading
from rlzoo.cli.pages import check_page, write_page
from rlzoo.cli.tables import check_files, interval, number, rule_label, save_tables, signed, table

if TYPE_CHECKING:
    from rlzoo.lab.compare import Comparison

LEGEND = """\
gain: {score} minus {score} before training
IQM: mean without the highest and lowest quarters of the seeds, with interval
clip: clipped share of responses or tokens; {match}: length error at this share,
0 if all lengths are clipped equally; noise: expected error in that case
len: tokens per response; s: seconds per run"""
MANY = 4  # maximum number of rules for which all pairs are shown, not just pairs with the best rule


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="Run directories, or folders that contain them, such as runs/ or a sweep's folder."),
    ],
    match: Annotated[
        float, typer.Option("--match-clip-fraction", min=0.001, max=0.9, help="Clip fraction at which to compare fairness.")
    ] = 0.1,
    match_by_sign: MatchBySign = False,
    plugin: Plugins = None,
    as_json: AsJson = False,
    report: Annotated[Path | None, typer.Option(help="HTML report to write; by default compare.html next to the runs.")] = None,
    csv: Csv = None,
    latex: Latex = None,
    quiet: Quiet = False,
) -> None:
    """Compare the rules of finished runs. Tables show scores with intervals, differences, evenness by length and costs."""
    check_files(csv, latex, report)
    beside = Path(os.path.commonpath([path.resolve() for path in runs])) / "compare.html"
    page = report or (None if as_json else beside)
    if page:
        check_page(page)
    with loading(is_quiet=quiet):
        from rlzoo.cli.bars import Bars
        from rlzoo.lab.compare import compare as compare_runs
        from rlzoo.lab.comparison_tracking import log_comparison
        from rlzoo.lab.reports import comparison_report
    with Bars(Plain(stderr=True), is_quiet=quiet, transient=True) as bars:
        result = compare_runs(runs, plugins=plugin or [], match=match, by_sign=match_by_sign, progress=bars.reach)
    if as_json:
        print(json.dumps(result.as_dict(), indent=2))
    else:
        _print(Plain(), result)
    save_tables(result.tables(), csv, latex)
    if page:
        write_page(page, comparison_report(result))
        Plain(stderr=as_json).print(f"report {os.path.relpath(page)}")
        log_comparison(result)


def _print(console: Plain, result: Comparison) -> None:
    from rlzoo.measure.comparison import LEVEL, MIN_SEEDS

    console.print(f"score: {result.score}")
    names = _numbered(result.labels)
    for label, name in names.items():
        if name != label:
            console.print(f"{name}: {label.partition(' ')[2]}")
    console.print(_scores(result, names, console))
    console.print(LEGEND.format(match=_matched(result), score=result.scored), style="dim")
    best = result.rules[0].label
    shown = [pair for pair in result.pairs if len(result.rules) <= MANY or best in (pair.first, pair.second)]
    pairs = table("<pair", ">difference", ">95 %", "<verdict")
    for pair in shown:
        pairs.add_row(
            f"{names[pair.first]} - {names[pair.second]}",
            signed(pair.mean),
            interval(pair.interval),
            "" if pair.p_value is None else pair.verdict,
        )
    if shown:
        console.print(pairs)
        if any(pair.p_value is not None for pair in shown):
            console.print(f"winners: paired t-test at {LEVEL} after Holm's correction for {len(result.pairs)} pairs")
        if any(pair.p_value is None for pair in shown):
            console.print(f"too few seeds: no winner is named with fewer than {MIN_SEEDS} common seeds")
    for sentence in (*result.notes, *result.highlights):
        console.print(sentence)


def _scores(result: Comparison, names: Mapping[str, str], console: Plain) -> Table:
    """Return the table of rules, with each label printed as its name in ``names``."""
    numbers = ("seeds", "mean", "gain", "IQM", "95 %", "clip", _matched(result), "noise", "len", "s")
    rows = table("<rule", *(f">{column}" for column in numbers))
    for rule in result.rules:
        rows.add_row(
            rule_label(names[rule.label], console),
            str(rule.score.num_seeds),
            number(rule.score.mean),
            signed(rule.gain),
            number(rule.score.iqm),
            interval(rule.score.iqm_interval),
            number(rule.mean("clip/fraction")),
            number(rule.matched_lre_max),
            number(rule.matched_noise),
            f"{rule.mean('response/length_mean', 0.25) or 0:.0f}",
            f"{fmean(run.seconds for run in rule.runs):.0f}",
        )
    return rows


def _matched(result: Comparison) -> str:
    """Return the column name for the length error at the matched clip fraction."""
    return "" if result.match is None else f"lre@{result.match:g}"


def _numbered(labels: Sequence[str]) -> dict[str, str]:
    """Return a short name for each label: the name of the rule, with a number if the label contains settings.

    Example:
        >>> _numbered(["fspo clip.width_low=0.1", "gspo", "fspo clip.width_low=0.2"])
        {'fspo clip.width_low=0.1': 'fspo (1)', 'gspo': 'gspo', 'fspo clip.width_low=0.2': 'fspo (2)'}
    """
    names, numbers = {}, Counter[str]()
    for label in labels:
        rule, _, settings = label.partition(" ")
        numbers[rule] += bool(settings)
        names[label] = f"{rule} ({numbers[rule]})" if settings else rule
    return names
