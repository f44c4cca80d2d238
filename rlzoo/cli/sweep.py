"""`rlzoo sweep`: starts several runs, shows their progress, and compares them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlzoo.cli.compare import compare
from rlzoo.cli.console import Plain
from rlzoo.cli.exits import FAILED
from rlzoo.cli.options import (
    Configs,
    Cpus,
    Gpus,
    On,
    Overrides,
    Plugins,
    Quiet,
    check_rule_names,
    lasting_output,
    loading,
    names_in,
)
from rlzoo.core.errors import UserError

if TYPE_CHECKING:
    from rlzoo.lab.sweep import Child, Executor, Sweep


@lasting_output()
def sweep(
    clip: Annotated[str, typer.Option(help="Comma-separated rules, such as fspo,gspo.")],
    seeds: Annotated[str, typer.Option(help="Number of seeds (5: seeds 0 to 4), or comma-separated seeds.")] = "5",
    grid: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=V1,V2", help="Values of a setting to combine with every rule and seed; may be repeated."),
    ] = None,
    config: Configs = None,
    set_: Overrides = None,
    steps: Annotated[int | None, typer.Option(help="Number of rollout batches to learn from in each run.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder of the sweep; finished runs in it are not repeated.")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, max=256, help="Number of runs at once; by default, as many as fit, or 64 with Slurm.")
    ] = None,
    plugin: Plugins = None,
    on: On = "local",
    cpus: Cpus = 1,
    gpus: Gpus = 0,
    quiet: Quiet = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the runs and exit.")] = False,
) -> None:
    """Train with every rule and seed, and compare the rules. Rerun the command to resume."""
    names = names_in("--clip", clip, "comma-separated rules; see `rlzoo clips list`")
    check_rule_names(names)
    with loading(is_quiet=quiet):
        from rlzoo.core.discovery import distinct
        from rlzoo.journal.tracking.uploads import tracking_uri
        from rlzoo.lab.sweep import Sweep, parse_seeds
    folder = output or Path("sweeps") / "-".join([*names[:4], *(["etc"] if len(names) > 4 else [])])
    if (folder / "config.yaml").exists():
        raise UserError(f"--output {str(folder)!r} is a run directory; choose a separate folder for the sweep")
    # a file cannot be an MLflow store for several machines
    untracked = ["tracking.mlflow=false"] if on != "local" and not tracking_uri().startswith("http") else []
    settings = (tuple(config or []), (*(set_ or []), *untracked), tuple(grid or []))
    sweep = Sweep(folder, names, parse_seeds(seeds), *settings, distinct(plugin or []), steps)
    console = Plain()
    if dry_run:
        for child in sweep.children:
            console.print(f"{child.name}{'  (finished)' if child.is_finished else ''}")
        _print_differences(sweep, console)
        return
    failed = finish(sweep, executor(on, jobs, cpus, gpus), console, is_quiet=quiet)
    if len(sweep.children) > len(failed):
        compare([folder], plugin=[*sweep.children[0].config.plugins], quiet=quiet)
    for child in failed:
        missing = "" if child.is_begun else ", or was deleted"
        console.print(f"{child.name} did not finish{missing}: see {folder / 'logs' / child.name}.log", style="red")
    if failed:
        raise typer.Exit(FAILED)


def _print_differences(sweep: Sweep, console: Plain) -> None:
    """Print the settings that differ between the rules, with every axis of the grid at its last value."""
    from rlzoo.lab.compare import other_differences
    from rlzoo.lab.runs import resolved_settings

    configs = {child.config.clip.name: child.config for child in sweep.children}.values()
    for note in other_differences([resolved_settings(one.model_dump(mode="json"), one.plugins.zoo) for one in configs]):
        console.print(note)


def executor(on: str, jobs: int | None, cpus: int, gpus: int) -> Executor:
    """Return a function that starts the runs of a sweep on this machine, on a Ray cluster or with Slurm."""
    if on == "ray":
        from rlzoo.lab.on_ray import Cluster

        return Cluster(cpus, gpus).run
    if on == "slurm":
        from rlzoo.lab.on_slurm import Slurm

        return Slurm(cpus, gpus, jobs).run
    if on != "local":
        raise UserError(f"--on {on!r}: unknown (allowed: local, ray, slurm)")
    if (cpus, gpus) != (1, 0):
        raise UserError("--cpus and --gpus need --on ray or slurm; on this machine, --jobs sets the number of runs at once")
    from rlzoo.lab.sweep import run_children

    return partial(run_children, jobs=jobs)


def finish(sweep: Sweep, execute: Executor, console: Plain, *, is_quiet: bool) -> list[Child]:
    """Start or resume all unfinished runs, and return the runs that failed."""
    from rlzoo.cli.bars import TOTAL, Bars
    from rlzoo.cli.progress import metrics_shown
    from rlzoo.lab.sweep import last_error

    bars = Bars(console, is_quiet=is_quiet)

    def look(running: Sequence[Child]) -> None:
        done = sum(child.config.steps for child in sweep.children if child.is_finished)
        for child in running:
            metrics = child.last_metrics()
            step = int(metrics.get("step", 0))
            done += 0 if child.is_finished else step
            words = f"reward {metrics['reward/mean']:.2f}" if "reward/mean" in metrics else ""
            bars.reach(child.name, step, child.config.steps, words)
        bars.reach(TOTAL, done, sum(child.config.steps for child in sweep.children))

    finished = sum(child.is_finished for child in sweep.children)

    def ended(child: Child, code: int) -> None:
        nonlocal finished  # counts the reported runs, because several may have finished since the last report
        bars.remove(child.name)
        finished += child.is_finished
        if is_quiet and child.is_finished:
            return
        metrics = child.last_metrics()
        reward, score, clip, *_ = metrics_shown(child.config.held_out_score)
        shown = [one for one in (score, reward, clip) if one.metric in metrics]
        words = last_error(child) or "  ".join(f"{one.word} {one.number(metrics[one.metric])}" for one in shown)
        outcome = "finished" if child.is_finished else f"ended with exit code {code}"
        console.print(f"{child.name} {outcome}  {words}  ({finished} of {len(sweep.children)})")

    if not is_quiet:
        already = f", {finished} of them already finished" if finished else ""
        console.print(f"{len(sweep.children)} runs in {sweep.folder}{already}")
        _print_differences(sweep, console)
    try:
        with bars:
            return execute(sweep.children, look, ended)
    except (KeyboardInterrupt, SystemExit):
        console.print(f"stopped; the sweep is in {sweep.folder}; rerun the same command to resume it")
        raise
