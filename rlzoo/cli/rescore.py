"""`rlzoo rescore`: the log-probs of any checkpoint for recorded tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rlzoo.cli.console import Plain
from rlzoo.cli.options import Quiet, loading


def rescore(
    recording: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Rollout files, folders of them, run directories.")
    ],
    output: Annotated[Path, typer.Option(help="Folder for the new rollout files; new, or empty.")],
    model: Annotated[
        list[str] | None,
        typer.Option(help="Checkpoint that becomes an update of all responses, replacing recorded ones; may be repeated."),
    ] = None,
    old: Annotated[
        str | None,
        typer.Option(help="Checkpoint of the old log-probs, or 'sampler' for the reported ones; as recorded without it."),
    ] = None,
    ref: Annotated[str | None, typer.Option(help="Checkpoint of the reference log-probs; as recorded without it.")] = None,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Type of the weights.")] = "float32",
    quiet: Quiet = False,
) -> None:
    """Compute the log-probs that other checkpoints give to recorded responses, and write them as new rollout files.

    Rules can then be compared at any distance between the model that sampled and the one that learns, by `rlzoo replay`.
    A checkpoint is 'embedded', 'smollm2', a folder, or a name on the hub. The recorded temperature applies.
    """
    with loading(is_quiet=quiet):
        from rlzoo.cli.bars import Bars
        from rlzoo.lab.rescore import rescore as compute
    with Bars(Plain(stderr=True), is_quiet=quiet, transient=True) as bars:
        files = compute(recording, output, model or [], old=old, ref=ref, dtype=dtype, reach=bars.reach)
    if not quiet:
        steps = f"{len(files)} step{'s' if len(files) > 1 else ''}"
        Plain().print(f"rescored {steps} into {output}; judge them with: rlzoo replay {output} --clip fspo,gspo,grpo")
