"""`rlzoo calibrate`: finds a rule's width with pilot runs and writes it to a config."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlzoo.cli.console import Plain
from rlzoo.cli.exits import FAILED
from rlzoo.cli.options import Configs, Overrides, Plugins, Quiet, lasting_output, loading
from rlzoo.core.errors import UserError

if TYPE_CHECKING:
    from rlzoo.lab.calibrate import Pilot


@lasting_output()
def calibrate(
    clip: Annotated[str, typer.Option(help="Rule to calibrate, such as fspo.")],
    target: Annotated[
        float, typer.Option("--target-clip-fraction", min=0.001, max=0.9, help="Share of responses to clip.")
    ] = 0.1,
    config: Configs = None,
    set_: Overrides = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the pilots.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Rollout batches per pilot.")] = 10,
    pilots: Annotated[int, typer.Option(min=1, max=50, help="Maximum number of pilots.")] = 6,
    output: Annotated[Path | None, typer.Option(help="Config file to write; by default NAME-calibrated.yaml.")] = None,
    plugin: Plugins = None,
    quiet: Quiet = False,
) -> None:
    """Find the width that clips a given share of responses. The command runs short pilots and writes the width to a config."""
    path = output or Path(f"{clip}-calibrated.yaml")
    if path.exists():
        raise UserError(f"{str(path)!r} exists; remove it, or choose another file with --output")
    if not path.parent.is_dir():
        raise UserError(f"--output {str(path)!r}: there is no folder {str(path.parent)!r}")
    with loading(is_quiet=quiet):
        from rlzoo.cli.progress import shown
        from rlzoo.config.run_config import RunConfig
        from rlzoo.lab.calibrate import calibrate as find_width
        from rlzoo.lab.calibrate import overlay
        from rlzoo.lab.replay import widths_as_text
    run = RunConfig.compose(config or [], clip=clip, overrides=set_ or [], plugins=plugin or [], seed=seed, steps=steps)
    console = Plain()

    def report(pilot: Pilot) -> None:
        if not quiet:
            console.print(
                f"clip fraction {pilot.clip_fraction:.3f} with {widths_as_text(pilot.policy) or 'the default settings'}"
            )

    title = f"pilots of {steps} steps: {run.clip.name} on {run.task.name}"
    with shown(console, title, steps, run.held_out_score, is_quiet=quiet) as view:
        best = find_width(run, target, max_pilots=pilots, on_pilot=report, observer=view.step)
    try:
        path.write_text(overlay(best, run), encoding="utf-8")
    except OSError as error:  # the result of a long search must not be lost
        console.out(overlay(best, run), highlight=False)
        raise UserError(f"--output {str(path)!r} cannot be written ({error.strerror}); the result is printed above") from error
    words = ["rlzoo", "train", "--config", str(path), *(word for one in plugin or [] for word in ("--plugin", one))]
    console.print(f"wrote {path}; use it with: {shlex.join(words)}")
    if not best.is_met:
        console.print(
            f"the closest of {pilots} pilots had a clip fraction of {best.clip_fraction:.3f}, not {target}; "
            f"try more with --{'steps' if best.policy.is_adaptive else 'pilots'}",
            style="red",
        )
        raise typer.Exit(FAILED)
