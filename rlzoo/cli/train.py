"""`rlzoo train`: composes the run, shows its progress, and says where everything is."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlzoo.cli.completions import completions, is_due
from rlzoo.cli.display import Plain, show_log
from rlzoo.cli.launch import end_with_the_launcher, launch, must_launch
from rlzoo.cli.outside import announce_plugins
from rlzoo.cli.progress import display_for
from rlzoo.cli.resume import check_unchanged, run_to_resume
from rlzoo.config.run_config import RunConfig
from rlzoo.errors import UserError
from rlzoo.planner.preflight import check
from rlzoo.training.checks import check_plugins_unchanged

if TYPE_CHECKING:
    from rlzoo.training.train import RunResult


@dataclass(frozen=True, slots=True)
class Showing:
    """What to print of a run.

    Example:
        ``Showing(is_quiet=True)``
    """

    is_quiet: bool = False  # only warnings and the result
    as_json: bool = False
    completions: int = 0  # responses to print, every tenth of the run

    def __post_init__(self) -> None:
        """Refuse what cannot be shown together."""
        if self.completions and (self.is_quiet or self.as_json):
            other = "--json" if self.as_json else "--quiet"
            raise UserError(f"--show-completions: not with {other}; every response is in rollouts/*.jsonl of the run directory")

    def arguments(self) -> list[str]:
        """The options again, for the processes of a launcher."""
        number = ["--show-completions", str(self.completions)] if self.completions else []
        return [*(["--quiet"] if self.is_quiet else []), *(["--json"] if self.as_json else []), *number]


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
    showing: Showing,
    devices: str | None = None,
    allow_changed_plugin: bool = False,
) -> None:
    """Train as the options say."""
    if devices and not dry_run:
        raise UserError("--devices: only together with --dry-run")
    if allow_changed_plugin and not resume:
        raise UserError("--allow-changed-plugin: only together with --resume")
    before = run_to_resume(output) if resume else ()
    config = RunConfig.compose(
        [*before, *configs], clip=clip, overrides=overrides, plugins=plugins, seed=seed, steps=steps, output=output
    )
    if before:
        check_unchanged(RunConfig.compose(before), config)
    if before and (dry_run or must_launch(config)):
        check_plugins_unchanged(config, allowed=allow_changed_plugin)
    if dry_run:
        from rlzoo.cli.plan import dry_run as show_plan

        given = _arguments(
            clip=clip, configs=configs, overrides=overrides, plugins=plugins, seed=seed, steps=steps, output=output
        )
        show_plan(config, given, devices, showing.as_json, resume=resume)
        return
    config = config.model_copy(update={"output": config.output or Path("runs") / _run_name(config)})
    end_with_the_launcher()
    check(config, resume=resume)
    if must_launch(config):
        options = [*showing.arguments(), *(["--allow-changed-plugin"] if allow_changed_plugin else [])]
        launch(config, resume=resume, options=options)
        return
    _train(config, resume, allow_changed_plugin, showing)


def _train(config: RunConfig, resume: bool, allow_changed_plugin: bool, showing: Showing) -> None:
    """Train in this process, which is one of several if a launcher has started it."""
    is_main = os.environ.get("RANK", "0") == "0"
    is_brief = showing.is_quiet or showing.as_json
    show_log((logging.WARNING if is_brief else logging.INFO) if is_main else logging.ERROR)
    announce_plugins(config)
    if not is_main:
        from rlzoo.training.train import train

        train(config, resume=resume, allow_changed_plugin=allow_changed_plugin)
        return
    path = config.output
    assert path is not None, "named before"
    console = Plain()
    title = f"{config.clip.name} on {config.task.name}, model {config.model.path}, seed {config.seed}"
    how = {"is_quiet": showing.is_quiet, "as_json": showing.as_json}
    with display_for(console, title, config.steps, run=path, **how) as display:
        from rlzoo.training.train import train  # takes seconds, seen on the display

        def observe(step: int, metrics: Mapping[str, float]) -> None:
            display.show(step, metrics)
            if showing.completions and is_due(step, config.steps):
                display.say(completions(path, step, showing.completions))

        result = train(config, observe, resume=resume, allow_changed_plugin=allow_changed_plugin)
    _print_result(console, result, showing)


def _print_result(console: Plain, result: RunResult, showing: Showing) -> None:
    """What the run came to, and where it is."""
    accuracies = [metrics["eval/accuracy"] for metrics in result.metrics if "eval/accuracy" in metrics]
    if showing.as_json:
        first, last = (accuracies[0], accuracies[-1]) if accuracies else (None, None)
        told = {
            "run": str(result.path),
            "mlflow_run": result.mlflow_run_id,
            "accuracy_first": first,
            "accuracy_last": last,
        }
        console.out(json.dumps({"result": told}), highlight=False)
        return
    if accuracies:
        console.print(f"held-out accuracy {accuracies[0]:.3f} -> {accuracies[-1]:.3f}")
    if result.profile is not None and not showing.is_quiet:
        from rlzoo.cli.chart import clip_by_length

        console.print(clip_by_length(result.profile))
    console.print(f"run directory {result.path}")
    if result.mlflow_run_id and not showing.is_quiet:
        console.print(f"MLflow run {result.mlflow_run_id}; look at it with: rlzoo ui")


def _run_name(config: RunConfig) -> str:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return f"{config.clip.name}-{config.task.name.replace(':', '-')}-{config.seed}-{stamp}"


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
