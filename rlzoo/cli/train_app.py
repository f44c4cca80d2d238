"""The commands that train, and their options: train, sweep, calibrate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlzoo.cli.options import Configs, Overrides, Plugins, Quiet, interruptible, lasting_output, loading


def train(
    clip: Annotated[str | None, typer.Option(help="Clip policy, see `rlzoo clips list`.")] = None,
    config: Configs = None,
    set_: Overrides = None,
    seed: Annotated[int | None, typer.Option(help="Seed of sampling and data order.")] = None,
    steps: Annotated[int | None, typer.Option(help="Rollout batches to learn from.")] = None,
    output: Annotated[Path | None, typer.Option(help="Run directory, new or empty.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in the run directory.")] = False,
    plugin: Plugins = None,
    allow_changed_plugin: Annotated[
        bool,
        typer.Option("--allow-changed-plugin", help="With --resume: also with a plugin that has changed since the start."),
    ] = False,
    processes: Annotated[int | None, typer.Option(min=1, help="Processes to train with, one for each GPU.")] = None,
    deepspeed: Annotated[
        str | None, typer.Option(metavar="zero2|zero3|FILE", help="What the processes share, or DeepSpeed's settings as JSON.")
    ] = None,
    show_completions: Annotated[
        int, typer.Option(metavar="N", min=0, help="Print N of the responses after the first step and every tenth of the run.")
    ] = 0,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print only warnings, the held-out accuracy at both ends, and the run directory.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check the run, print its complete configuration, and its plan on stderr; then stop."),
    ] = False,
    devices: Annotated[
        str | None, typer.Option(metavar="NxNAME", help="With --dry-run: plan for these, such as 8xH100 or 2x24GB.")
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print a JSON line for every step, as in metrics.jsonl, and one with the result. With --dry-run: "
            "configuration and plan as JSON.",
        ),
    ] = False,
) -> None:
    """Train a model; without --config, the shipped model on arithmetic."""
    launch = {"launch.processes": processes, "launch.deepspeed": deepspeed}
    overrides = [*(set_ or []), *(f"{key}={value}" for key, value in launch.items() if value is not None)]
    with interruptible(), lasting_output():
        with loading(is_quiet=quiet):
            from rlzoo.cli.train import Showing, run

        run(
            clip=clip,
            configs=config or [],
            overrides=overrides,
            seed=seed,
            steps=steps,
            output=output,
            resume=resume,
            plugins=plugin or [],
            dry_run=dry_run,
            devices=devices,
            allow_changed_plugin=allow_changed_plugin,
            showing=Showing(quiet, as_json, show_completions),
        )


def sweep(
    clip: Annotated[str, typer.Option(help="Clip policies, with commas between them.")],
    seeds: Annotated[str, typer.Option(help="A number of seeds (5: 0 to 4), or seeds with commas between them.")] = "5",
    grid: Annotated[
        list[str] | None, typer.Option(metavar="KEY=V1,V2", help="Also every one of these values; may be repeated.")
    ] = None,
    config: Configs = None,
    set_: Overrides = None,
    steps: Annotated[int | None, typer.Option(help="Rollout batches to learn from, in each run.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder of the sweep; finished runs in it are not done again.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, max=256, help="Runs at once; as many as the machine has room for.")] = None,
    plugin: Plugins = None,
    quiet: Quiet = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the runs and stop.")] = False,
) -> None:
    """Race policies: every policy with every seed, nested under one MLflow run; started again, it goes on."""
    from rlzoo.cli.exits import FAILED

    with interruptible(), lasting_output():
        with loading(is_quiet=quiet):
            from rlzoo.cli.sweep import run_sweep

        succeeded = run_sweep(
            clips=clip.split(","),
            seeds=seeds,
            grid=grid or [],
            configs=config or [],
            overrides=set_ or [],
            steps=steps,
            output=output,
            jobs=jobs,
            plugins=plugin or [],
            dry_run=dry_run,
            is_quiet=quiet,
        )
    if not succeeded:
        raise typer.Exit(FAILED)


def calibrate(
    clip: Annotated[str, typer.Option(help="Clip policy with a width.")],
    target: Annotated[
        float, typer.Option("--target-clip-fraction", min=0.001, max=0.9, help="Share of the responses to clip.")
    ] = 0.1,
    config: Configs = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting, such as learner.lr=1e-5.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the pilots.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Rollout batches of a pilot.")] = 10,
    pilots: Annotated[int, typer.Option(min=1, max=50, help="Pilots at most.")] = 6,
    output: Annotated[Path | None, typer.Option(help="Config file to write; NAME-calibrated.yaml without it.")] = None,
    plugin: Plugins = None,
    quiet: Quiet = False,
) -> None:
    """Find the width that clips a wanted share of the responses, by short pilot runs, and write it as a config."""
    from rlzoo.cli.exits import FAILED

    with interruptible(), lasting_output():
        with loading(is_quiet=quiet):
            from rlzoo.cli.calibrate import run_calibration

        is_met = run_calibration(
            clip=clip,
            target=target,
            configs=config or [],
            overrides=set_ or [],
            plugins=plugin or [],
            seed=seed,
            steps=steps,
            max_pilots=pilots,
            output=output,
            is_quiet=quiet,
        )
    if not is_met:
        raise typer.Exit(FAILED)
