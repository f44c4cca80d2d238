"""`rlzoo train`: composes a run, shows its progress, and prints where the results are."""

from __future__ import annotations

import gc
import json
import logging
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlzoo.cli.chart import clip_by_length
from rlzoo.cli.console import Plain, show_log
from rlzoo.cli.options import Configs, Overrides, Plugins, Quiet, check_rule_names, lasting_output, loading
from rlzoo.core.errors import UserError
from rlzoo.models.watch import watched_ranks

if TYPE_CHECKING:
    from rlzoo.config.run_config import RunConfig
    from rlzoo.training.train import RunResult

logger = logging.getLogger("rlzoo")


@lasting_output()
@watched_ranks()
def train(
    clip: Annotated[str | None, typer.Option(help="Rule to train with, such as fspo (see `rlzoo clips list`).")] = None,
    config: Configs = None,
    set_: Overrides = None,
    seed: Annotated[int | None, typer.Option(help="Seed for sampling and for the order of the data.")] = None,
    steps: Annotated[int | None, typer.Option(help="Number of rollout batches to learn from.")] = None,
    output: Annotated[Path | None, typer.Option(help="New or empty run directory.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the newest checkpoint in the run directory.")] = False,
    plugin: Plugins = None,
    allow_changed: Annotated[
        bool,
        typer.Option("--allow-changed", help="With --resume: allow changed settings, code, data and model."),
    ] = False,
    processes: Annotated[int | None, typer.Option(min=1, help="Number of processes to train with, one for each GPU.")] = None,
    deepspeed: Annotated[
        str | None,
        typer.Option(metavar="zero2|zero3|FILE", help="ZeRO stage for sharding, or a DeepSpeed configuration file in JSON."),
    ] = None,
    fsdp: Annotated[
        bool | None,
        typer.Option("--fsdp", help="Use FSDP2 to shard weights, gradients and optimizer states across the processes."),
    ] = None,
    quiet: Quiet = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check the run, print its configuration to stdout, then its plan to stderr, and exit."),
    ] = False,
    devices: Annotated[
        str | None, typer.Option(metavar="NxNAME", help="With --dry-run: devices to plan for, such as 8xH100 or 2x24GB.")
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print a JSON line per step, as in metrics.jsonl, and one with the result. With --dry-run: "
            "print the configuration and the plan as JSON.",
        ),
    ] = False,
) -> None:
    """Train a model: by default, the bundled one on arithmetic."""
    if devices and not dry_run:
        raise UserError("--devices needs --dry-run")
    if allow_changed and not resume:
        raise UserError("--allow-changed needs --resume")
    check_rule_names([clip] if clip else [])
    if clip and "," in clip:
        raise UserError(f"--clip {clip!r}: a run has one rule; compare several with: rlzoo sweep --clip {shlex.quote(clip)}")
    with loading(is_quiet=quiet):
        from rlzoo.cli.launch import end_with_the_launcher, launch, must_launch
        from rlzoo.config.run_config import RunConfig
        from rlzoo.gate.fingerprint import check_unchanged, run_facts
        from rlzoo.gate.settings import Start, check_settings, usual_output
    level = logging.WARNING if quiet or as_json else logging.INFO
    show_log(level if os.environ.get("RANK", "0") == "0" else logging.ERROR)
    before = run_to_resume(output) if resume else ()
    options = {"launch.processes": processes, "launch.deepspeed": deepspeed, "launch.fsdp": fsdp}
    overrides = [*(set_ or []), *(f"{key}={value}" for key, value in options.items() if value is not None)]
    run = RunConfig.compose(
        [*before, *(config or [])], clip=clip, overrides=overrides, plugins=plugin or [], seed=seed, steps=steps, output=output
    )
    if dry_run:
        from rlzoo.cli.plan import dry_run as show_plan

        show_log(logging.WARNING)  # the plan has the rest
        show_plan(run, devices, as_json, resume=resume, allow_changed=allow_changed)
        return
    run = run.model_copy(update={"output": run.output or usual_output(run)})
    end_with_the_launcher()
    if must_launch(run):
        check_settings(run, Start.of(run, resume=resume))
        if resume:
            check_unchanged(run, run_facts(run), allow_changed=allow_changed)
        flags = {"--quiet": quiet, "--json": as_json, "--allow-changed": allow_changed}
        launch(run, resume=resume, options=[flag for flag, is_set in flags.items() if is_set])
    else:
        _train(run, resume, allow_changed, quiet, as_json)


def run_to_resume(output: Path | None) -> tuple[Path]:
    """Return the config file of the run to resume, as a tuple for `RunConfig.compose`."""
    if output is None:
        raise UserError("--resume needs --output with the directory of the run")
    from rlzoo.journal.run_directory import RunDirectory

    RunDirectory.check_begun(output)
    return (output / "config.yaml",)


def _train(run: RunConfig, resume: bool, allow_changed: bool, is_quiet: bool, as_json: bool) -> None:
    """Train in this process. If a launcher started several processes, only the first one prints."""
    from rlzoo.cli.progress import shown

    is_main = os.environ.get("RANK", "0") == "0"
    for source, policies in run.plugins.zoo.outside().items():
        logger.info("plugin loaded: %s (%s)", source, ", ".join(policies))
    path = run.output
    assert path is not None, "set by train"
    console = Plain()
    title = f"{run.clip.name} on {run.task.name}, model {run.model.path}, seed {run.seed}"
    held_out, is_silent = run.held_out_score, is_quiet or not is_main
    try:
        with shown(console, title, run.steps, held_out, is_quiet=is_silent, as_json=as_json) as view:
            from rlzoo.models.processes import leave_process_group
            from rlzoo.training.train import train as learn  # this import takes seconds, so the display starts first

            gc.freeze()  # otherwise, every garbage collection would scan half a million objects again
            gc.set_threshold(700, 10, 10)  # Python's default, because reference cycles may keep tensors alive
            result = learn(run, view.step, resume=resume, allow_changed=allow_changed, stage=view.stage)
    except (KeyboardInterrupt, SystemExit):
        # the log ends with the same command, but the curves are printed below it
        if console.is_screen and not (is_silent or as_json) and (path / "config.yaml").is_file():
            console.print(f"resume with: rlzoo train --resume --output {shlex.quote(str(path))}")
        raise
    if is_main:
        _print_result(console, result, run, is_quiet=is_quiet, as_json=as_json)
    leave_process_group()


def _print_result(console: Plain, result: RunResult, run: RunConfig, *, is_quiet: bool, as_json: bool) -> None:
    accuracies = [metrics["eval/accuracy"] for metrics in result.metrics if "eval/accuracy" in metrics]
    if as_json:
        first, last = (accuracies[0], accuracies[-1]) if accuracies else (None, None)
        summary = {"run": str(result.path), "mlflow_run": result.mlflow_run_id, "accuracy_first": first, "accuracy_last": last}
        console.out(json.dumps({"result": summary}), highlight=False)
        return
    if accuracies:
        console.print(f"held-out {run.held_out_score} {accuracies[0]:.3f} -> {accuracies[-1]:.3f}")
    if result.profile is not None and not is_quiet:
        console.print(clip_by_length(result.profile, console))
    if not any("learner/grad_norm" in metrics for metrics in result.metrics):
        console.print("nothing was learned, because every advantage was 0: do all responses to a prompt get the same reward?")
    console.print(f"run directory {result.path}")
    if is_quiet:
        return
    page, folder = result.path / "figures" / "completions.html", result.path.parent
    if page.is_file():
        console.print(f"clip decisions in individual responses: {page}")
    if len(list(folder.glob("*/summary.json"))) > 1:
        plugins = "".join(f" --plugin {shlex.quote(os.path.relpath(path))}" for path in run.plugins)
        console.print(f"compare the finished runs in {folder}: rlzoo compare {shlex.quote(str(folder))}{plugins}")
    if result.mlflow_run_id:
        from rlzoo.journal.tracking.uploads import tracking_uri, without_password

        store = tracking_uri()
        console.print(f"view the runs in MLflow: {without_password(store) if store.startswith('http') else 'rlzoo ui'}")
