"""`rlzoo convert`: converts rollout dumps from other trainers to rollout files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlzoo.cli.console import Plain
from rlzoo.cli.options import loading
from rlzoo.errors import UserError


def convert(
    dumps: Annotated[list[Path], typer.Argument(metavar="DUMP", help="Dumps, or folders that contain them.")],
    trainer: Annotated[
        str, typer.Option("--from", help="Trainer that wrote the dumps: verl, prime-rl, nemo-rl, skyrl or slime.")
    ],
    output: Annotated[Path, typer.Option(help="New or empty folder for the rollout files, one per step.")],
    temperature: Annotated[
        float, typer.Option(min=1e-3, max=1e3, help="Sampling temperature, which dumps do not record.")
    ] = 1.0,
) -> None:
    """Convert rollout dumps from another trainer to rollout files, which `replay` and `fairness` read."""
    with loading():
        from rlzoo.integrations.dumps import read_dumps
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output {str(output)!r} exists and is not an empty folder; choose another")
    is_new, written = not output.exists(), list[Path]()
    try:
        for step in read_dumps(trainer, dumps, temperature):
            output.mkdir(parents=True, exist_ok=True)
            written.append(output / f"{step.step:06d}.safetensors")
            step.save(written[-1])
    except BaseException:
        for file in written:
            file.unlink(missing_ok=True)
        if is_new and output.exists():
            output.rmdir()
        raise
    Plain().print(f"converted {len(written)} steps to {output}")
