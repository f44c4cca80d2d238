"""`rlzoo calibrate`: finds a policy's width by pilot runs and writes it as a config."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlzoo.cli.display import Plain
from rlzoo.cli.progress import display_for
from rlzoo.config.run_config import RunConfig
from rlzoo.errors import UserError
from rlzoo.lab.calibrate import Pilot, calibrate, nearest, overlay
from rlzoo.lab.replay import widths_of


def run_calibration(
    *,
    clip: str,
    target: float,
    configs: Sequence[str],
    overrides: Sequence[str],
    plugins: Sequence[str],
    seed: int | None,
    steps: int,
    max_pilots: int,
    output: Path | None,
    is_quiet: bool = False,
) -> bool:
    """Calibrate a policy; whether the wanted clip fraction was met."""
    path = output or Path(f"{clip}-calibrated.yaml")
    if path.exists():
        raise UserError(f"{str(path)!r} exists; name another file with --output, or remove it")
    if not path.parent.is_dir():
        raise UserError(f"--output {str(path)!r}: there is no folder {str(path.parent)!r}")
    config = RunConfig.compose(configs, clip=clip, overrides=overrides, plugins=plugins, seed=seed, steps=steps)
    console = Plain()

    def told(pilot: Pilot) -> None:
        widths = ", ".join(f"{name} {value:.4g}" for name, value in widths_of(pilot.policy).items())
        display.say(f"clip fraction {pilot.clip_fraction:.3f} with {widths}")

    title = f"pilots of {steps} steps: {config.clip.name} on {config.task.name}"
    with display_for(console, title, steps, is_quiet=is_quiet) as display:
        pilots = calibrate(config, target, max_pilots=max_pilots, told=told, observer=display.show)
    best = nearest(pilots)
    path.write_text(overlay(best, config), encoding="utf-8")
    console.print(f"wrote {path}; use it with: rlzoo train --config {path}")
    if not best.is_met:
        console.print(
            f"the nearest of {len(pilots)} pilots clipped {best.clip_fraction:.3f}, not {target}; try more with --pilots",
            style="red",
        )
    return best.is_met
