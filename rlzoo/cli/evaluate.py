"""`rlzoo eval`: samples k responses to every problem in one or more suites and prints tables of the results."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from rlzoo.cli.console import Plain, show_log
from rlzoo.cli.options import AsJson, Csv, Latex, Plugins, Quiet, lasting_output, loading, names_in
from rlzoo.cli.tables import check_files, number, report_table, save_tables

EXPERIMENT = "rlzoo"
SIDE_BY_SIDE = 3  # suites per table, so that a table fits in a terminal with 80 columns


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
    against: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Another evaluation of these problems; shows the differences from it.")
    ] = None,
    plugin: Plugins = None,
    as_json: AsJson = False,
    csv: Csv = None,
    latex: Latex = None,
    quiet: Quiet = False,
    mlflow: Annotated[bool, typer.Option("--mlflow/--no-mlflow", help="Log the results to MLflow.")] = True,
) -> None:
    """Evaluate a model on suites, or a run on its own task. Reports mean@k, pass@k and maj@k; rerun the command to resume."""
    names = () if suite is None else names_in("--suite", suite, "comma-separated suites, such as gsm8k,math500")
    check_files(csv, latex)
    with loading(is_quiet=quiet):
        from rlzoo.cli.bars import Bars
        from rlzoo.lab.evaluation import EvaluationConfig, default_output
        from rlzoo.lab.evaluation import evaluate as measure
    options = {"temperature": temperature, "max_new_tokens": max_new_tokens, "group_size": k}
    overrides = [*(f"rollout.{key}={value}" for key, value in options.items() if value is not None), *(set_ or [])]
    chosen = {} if seed is None else {"seed": seed}
    config = EvaluationConfig.compose(model, overrides, plugin or [], suites=names, data=data, limit=limit, **chosen)
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
            result = measure(config, path, against=against, experiment=EXPERIMENT if mlflow else None, progress=report)
    except (KeyboardInterrupt, SystemExit):
        messages.print(f"stopped; the evaluation is in {path}; rerun the same command to resume it")
        raise
    if as_json:
        print(json.dumps(result.as_dict(), indent=2))
    else:
        for start in range(0, len(result.results), SIDE_BY_SIDE):
            for content in replace(result, results=result.results[start : start + SIDE_BY_SIDE]).tables():
                console.print(report_table(content))
    save_tables(result.tables(), csv, latex)
    if quiet:
        return
    messages.print(f"completions and results in {path}")
    if result.mlflow_run_id:
        messages.print(f"MLflow run {result.mlflow_run_id}; view it with: rlzoo ui")
