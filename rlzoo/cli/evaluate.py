"""`rlzoo eval`: k responses to every problem of some suites, with their progress, and tables of what they come to."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.progress import TaskID, TextColumn
from rich.table import Table

from rlzoo.cli.display import Bars, Plain, show_log, timed
from rlzoo.cli.tables import interval, number
from rlzoo.errors import UserError
from rlzoo.lab.evaluation import EvaluationConfig, SuiteResult, default_output, evaluate
from rlzoo.measure.at_k import AtK

EXPERIMENT = "rlzoo"
SIDE_BY_SIDE = 3  # suites in a table: so it fits a terminal of 80 columns


def run_evaluation(
    *,
    model: str,
    suites: str,
    overrides: Sequence[str],
    settings: Mapping[str, Any],
    data: Path | None,
    output: Path | None,
    as_json: bool,
    mlflow: bool,
    is_quiet: bool = False,
) -> None:
    """Evaluate, and show what came of it; stopped, say where it goes on."""
    names = tuple(dict.fromkeys(name.strip() for name in suites.split(",") if name.strip()))
    if not names:
        raise UserError(f"--suite {suites!r}: give suites with commas between them, such as gsm8k,math500")
    config = EvaluationConfig.compose(model, overrides, suites=names, data=data, **settings)
    path = output or default_output(config)
    show_log(logging.WARNING if is_quiet else logging.INFO)
    console, messages = Plain(), Plain(stderr=as_json)
    try:
        with EvaluationDisplay(messages, names, is_quiet=is_quiet) as display:
            result = evaluate(config, path, experiment=EXPERIMENT if mlflow else None, told=display.show)
    except (KeyboardInterrupt, SystemExit):
        messages.print(f"stopped; the same command goes on where it was, in {path}")
        raise
    if as_json:
        print(json.dumps(result.as_dict(), indent=2))
    else:
        for start in range(0, len(result.results), SIDE_BY_SIDE):
            console.print(_table(result.results[start : start + SIDE_BY_SIDE]))
        for suite in result.results:
            console.print(_by_length(suite))
    if is_quiet:
        return
    messages.print(f"completions and results in {path}")
    if result.mlflow_run_id:
        messages.print(f"MLflow run {result.mlflow_run_id}; look at it with: rlzoo ui")


class EvaluationDisplay(Bars):
    """A row with a bar for each suite on a screen, a plain line per batch elsewhere."""

    def __init__(self, console: Plain, suites: Sequence[str], *, is_quiet: bool = False) -> None:
        self._is_quiet = is_quiet
        super().__init__(
            console, TextColumn("{task.fields[suite]}"), *timed(console), TextColumn("{task.description}"), is_quiet=is_quiet
        )
        self._suites: dict[str, TaskID] = {
            suite: self.add_task("", total=None, start=False, visible=False, suite=suite) for suite in suites
        }

    def show(self, suite: str, done: int, total: int, so_far: Mapping[str, float]) -> None:
        """Show how far a suite is."""
        words = "  ".join(f"{name} {number(value)}" for name, value in so_far.items())
        if self.is_drawn:
            self.reach(self._suites[suite], done, total=total, description=words)
        elif not self._is_quiet:
            self.console.print(f"{suite} {done}/{total}  {words}".rstrip())


def _table(results: Sequence[SuiteResult]) -> Table:
    """A row per measure, a column per suite."""
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for result in results:
        table.add_column(result.suite, justify="right", no_wrap=True)
        table.add_column("95 %", justify="right", no_wrap=True)
    for name in results[0].estimates:
        table.add_row(name, *(word for result in results for word in _words(result.estimates[name])))
    plain = {
        "problems": [str(result.num_problems) for result in results],
        "tokens": [f"{result.response_length_mean:.0f}" for result in results],
        "cut off": [number(result.truncated) for result in results],
        "no answer": [number(result.no_answer) for result in results],
    }
    for name, values in plain.items():
        table.add_row(name, *(word for value in values for word in (value, "")))
    return table


def _by_length(result: SuiteResult) -> Table:
    """A row per length bin."""
    title = f"{result.suite} by response length in tokens"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    mean, whole = next(iter(result.estimates)), list(result.estimates)[-2:]
    for column in ("up to", "resp", mean, "95 %", "prob", *(word for name in whole for word in (name, "95 %"))):
        table.add_column(column, justify="right", no_wrap=True)
    for row in (row for row in result.by_length if row.num_responses or row.num_problems):
        by_problem = [word for name in whole for word in _words(row.estimates.get(name))]
        by_response = _words(row.estimates.get(mean))
        table.add_row(str(row.longest), str(row.num_responses), *by_response, str(row.num_problems), *by_problem)
    return table


def _words(estimate: AtK | None) -> tuple[str, str]:
    return ("-", "-") if estimate is None else (number(estimate.value), interval(estimate.interval))
