"""`rlzoo train`: composes the run, shows its progress, and says where everything is."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rlzoo.cli.chart import clip_by_length
from rlzoo.cli.launch import end_with_the_launcher, launch, must_launch
from rlzoo.cli.outside import announce_plugins
from rlzoo.cli.resume import check_unchanged, run_to_resume
from rlzoo.config import RunConfig
from rlzoo.errors import UserError


def run(
    *,
    clip: str | None,
    configs: Sequence[str],
    overrides: Sequence[str],
    seed: int | None,
    steps: int | None,
    output: Path | None,
    resume: bool,
    plugins: Sequence[str],
    dry_run: bool,
    devices: str | None = None,
    as_json: bool = False,
) -> None:
    """Train as the options say."""
    if (devices or as_json) and not dry_run:
        raise UserError(f"{'--devices' if devices else '--json'}: only together with --dry-run")
    before = run_to_resume(output) if resume else ()
    config = RunConfig.compose(
        [*before, *configs], clip=clip, overrides=overrides, plugins=plugins, seed=seed, steps=steps, output=output
    )
    if before:
        check_unchanged(RunConfig.compose(before), config)
    if dry_run:
        from rlzoo.cli.plan import dry_run as show_plan

        given = _arguments(
            clip=clip, configs=configs, overrides=overrides, plugins=plugins, seed=seed, steps=steps, output=output
        )
        show_plan(config, given, devices, as_json)
        return
    if must_launch(config):
        launch(config, resume=resume)
        return
    end_with_the_launcher()
    is_main = os.environ.get("RANK", "0") == "0"
    _show_our_log(logging.INFO if is_main else logging.ERROR)
    announce_plugins(config)
    from rlzoo.engine.loop import train

    if not is_main:
        train(config, resume=resume)
        return
    console = Console(highlight=False, markup=False)  # paths and names may hold brackets
    title = f"{config.clip.name} on {config.task.name}, model {config.model.path}, seed {config.seed}"
    with ProgressDisplay(console, title, config.steps) as display:
        result = train(config, display.show, resume=resume)
    accuracies = [metrics["eval/accuracy"] for metrics in result.metrics if "eval/accuracy" in metrics]
    if accuracies:
        console.print(f"held-out accuracy {accuracies[0]:.3f} -> {accuracies[-1]:.3f}")
    if result.profile is not None:
        console.print(clip_by_length(result.profile))
    console.print(f"run directory {result.path}", soft_wrap=True)
    if result.mlflow_run_id:
        console.print(f"MLflow run {result.mlflow_run_id}; look at it with: rlzoo ui", soft_wrap=True)


def _arguments(
    *,
    clip: str | None,
    configs: Sequence[str],
    overrides: Sequence[str],
    plugins: Sequence[str],
    seed: int | None,
    steps: int | None,
    output: Path | None,
) -> list[str]:
    """The options again, as they may be typed."""
    repeated = {"--config": configs, "--set": overrides, "--plugin": plugins}
    once = {"--clip": clip, "--seed": seed, "--steps": steps, "--output": output}
    pairs = [(name, value) for name, values in repeated.items() for value in values]
    pairs += [(name, str(value)) for name, value in once.items() if value is not None]
    return [word for pair in pairs for word in pair]


class ProgressDisplay:
    """A progress bar on a terminal, a plain line per step elsewhere."""

    def __init__(self, console: Console, title: str, steps: int) -> None:
        self._console = console
        self._title = title
        self._steps = steps
        self._progress = Progress(
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._bar = self._progress.add_task("starting", total=steps)

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show one step's metrics."""
        if step == 0:
            self._progress.console.print(self._title, style="bold")
        words = {"reward": metrics.get("reward/mean"), "clip": metrics.get("clip/fraction")}
        if not self._console.is_terminal:  # there, accuracy has a line of its own
            words["accuracy"] = metrics.get("eval/accuracy")
        text = "  ".join(f"{word} {value:.3f}" for word, value in words.items() if value is not None)
        if "throughput/tokens_per_second" in metrics:
            text += f"  {metrics['throughput/tokens_per_second']:,.0f} tok/s"
        self._progress.update(self._bar, completed=step, description=text)
        if not self._console.is_terminal:
            self._console.print(f"step {step}/{self._steps}  {text}", soft_wrap=True)
        elif "eval/accuracy" in metrics:
            self._progress.console.print(f"step {step}: held-out accuracy {metrics['eval/accuracy']:.3f}")

    def print(self, line: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(line, soft_wrap=True)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._progress.stop()


def _show_our_log(level: int) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("rlzoo").setLevel(level)
