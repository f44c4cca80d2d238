"""`rlzoo eval`: samples k responses to every problem in one or more suites, and prints tables of the results."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlzoo.cli.console import Plain, show_log
from rlzoo.cli.options import AsJson, Csv, Latex, Quiet, lasting_output, loading, names_in
from rlzoo.cli.tables import check_files, number, report_table, save_tables

if TYPE_CHECKING:
    from rlzoo.lab.evaluation import SuiteResult
    from rlzoo.measure.at_k import AtK
    from rlzoo.measure.report import Cell, Table

EXPERIMENT = "rlzoo"
BATCH_SIZE = 64  # responses sampled at once, unless --set rollout.batch_size says otherwise
SIDE_BY_SIDE = 3  # suites per table, so that a table fits into a terminal with 80 columns


@lasting_output()
def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="'embedded', 'embedded-guess', 'smollm2', a GGUF file, a folder, a run directory, or a hub name.",
        ),
    ],
    suite: Annotated[
        str | None,
        typer.Option(help="Suites: gsm8k, math500, amc23, aime24, aime25, arithmetic, or your own; default: the run's task."),
    ] = None,
    k: Annotated[int, typer.Option("--k", min=1, max=4096, help="Responses per problem.")] = 16,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature; default: 1, or the run's.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Limit in tokens; default: 2048, or the run's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed for sampling; default: 0, or the run's.")] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Use only the first N problems of each suite.")] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with local copies of the suites, such as gsm8k.jsonl; by default, they come from the hub."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Another setting, such as model.dtype=bfloat16."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Output folder; an unfinished evaluation in it is resumed.")] = None,
    as_json: AsJson = False,
    csv: Csv = None,
    latex: Latex = None,
    quiet: Quiet = False,
    mlflow: Annotated[bool, typer.Option("--mlflow/--no-mlflow", help="Log the results to MLflow.")] = True,
) -> None:
    """Evaluate a model with mean@k, pass@k and maj@k on suites, or on a run's own task; rerun the command to resume."""
    names = () if suite is None else names_in("--suite", suite, "comma-separated suites, such as gsm8k,math500")
    check_files(csv, latex)
    with loading(is_quiet=quiet):
        from rlzoo.cli.bars import Bars
        from rlzoo.lab.evaluation import EvaluationConfig, default_output
        from rlzoo.lab.evaluation import evaluate as measure
    options = {"temperature": temperature, "max_new_tokens": max_new_tokens, "group_size": k, "batch_size": BATCH_SIZE}
    usual = {"temperature": 1.0, "max_new_tokens": 2048} if names else {}
    options = {key: usual.get(key) if value is None else value for key, value in options.items()}
    overrides = [*(f"rollout.{key}={value}" for key, value in options.items() if value is not None), *(set_ or [])]
    chosen = {} if seed is None else {"seed": seed}
    config = EvaluationConfig.compose(model, overrides, suites=names, data=data, limit=limit, **chosen)
    path = output or default_output(config)
    show_log(logging.WARNING if quiet else logging.INFO)
    console, messages = Plain(), Plain(stderr=as_json)
    bars = Bars(messages, is_quiet=quiet)

    def report(suite: str, done: int, total: int, so_far: Mapping[str, float]) -> None:
        words = "  ".join(f"{name} {number(value)}" for name, value in so_far.items())
        bars.reach(suite, done, total, words)
        if bars.disable and not quiet:
            messages.print(f"{suite} {done}/{total}  {words}".rstrip())

    try:
        with bars:
            result = measure(config, path, experiment=EXPERIMENT if mlflow else None, progress=report)
    except (KeyboardInterrupt, SystemExit):
        messages.print(f"stopped; the evaluation is in {path}; rerun the same command to resume it")
        raise
    by_length = [_by_length(one) for one in result.results if one.estimates]
    if as_json:
        print(json.dumps(result.as_dict(), indent=2))
    else:
        side_by_side = range(0, len(result.results), SIDE_BY_SIDE)
        for content in (*(_table(result.results[start : start + SIDE_BY_SIDE]) for start in side_by_side), *by_length):
            console.print(report_table(content))
    save_tables([_table(result.results), *by_length], csv, latex)
    if quiet:
        return
    messages.print(f"completions and results in {path}")
    if result.mlflow_run_id:
        messages.print(f"MLflow run {result.mlflow_run_id}; view it with: rlzoo ui")


def _table(results: Sequence[SuiteResult]) -> Table:
    """Return a table with a row per measure and a column per suite."""
    from rlzoo.measure.report import Row, Table

    rows: list[Row] = [
        [name, *(cell for result in results for cell in _cells(result.estimates.get(name)))] for name in results[0].estimates
    ]
    plain: dict[str, list[float | None]] = {
        "problems": [result.num_problems for result in results],
        "tokens": [result.response_length_mean for result in results],
        "cut off": [result.truncated for result in results],
        **({"no grade": [result.failed for result in results]} if any(result.failed for result in results) else {}),
        "no answer": [result.no_answer for result in results],
    }
    rows += [[name, *(cell for value in values for cell in (value, ""))] for name, values in plain.items()]
    return Table("", ["", *(column for result in results for column in (result.suite, "95 %"))], rows)


def _by_length(result: SuiteResult) -> Table:
    """Return a table with a row per length bin."""
    from rlzoo.measure.report import Row, Table

    mean = next(iter(result.estimates))
    of_problems = [name for name in (mean.replace("mean", "pass"), mean.replace("mean", "maj")) if name in result.estimates]
    columns = ["up to", "resp", mean, "95 %", "prob", *(word for name in of_problems for word in (name, "95 %"))]
    rows: list[Row] = []
    for row in (row for row in result.by_length if row.num_responses or row.num_problems):
        by_problem = [cell for name in of_problems for cell in _cells(row.estimates.get(name))]
        rows.append([row.longest, row.num_responses, *_cells(row.estimates.get(mean)), row.num_problems, *by_problem])
    return Table(f"{result.suite} by response length in tokens", columns, rows)


def _cells(estimate: AtK | None) -> tuple[Cell, Cell]:
    return (None, None) if estimate is None else (estimate.value, estimate.interval)
