"""`rlzoo rescore`: computes the log-probs of recorded tokens under other checkpoints."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from rlzoo.cli.console import Plain
from rlzoo.cli.options import Quiet, loading


def rescore(
    recording: Annotated[
        list[Path], typer.Argument(metavar="FILE", help="Rollout files, folders with rollout files, or run directories.")
    ],
    output: Annotated[Path, typer.Option(help="New or empty folder for the new rollout files.")],
    model: Annotated[
        list[str] | None,
        typer.Option(help="Checkpoint whose log-probs serve as an update, in place of the recorded updates; may be repeated."),
    ] = None,
    old: Annotated[
        str | None,
        typer.Option(
            help="Checkpoint for the old log-probs, or 'sampler' for the log-probs that the sampler reported; by default, the "
            "recorded values."
        ),
    ] = None,
    ref: Annotated[
        str | None, typer.Option(help="Checkpoint for the reference log-probs; by default, the recorded values.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Compute log-probs of recorded responses with other weights.

    `rlzoo replay` can then compare rules at any distance between the sampling model and the trained model.
    A checkpoint is 'embedded', 'smollm2', a GGUF file, a folder, or a name on the hub. The recorded temperature is used.
    """
    with loading(is_quiet=quiet):
        from rlzoo.cli.bars import Bars
        from rlzoo.lab.rescore import rescore as compute
    with Bars(Plain(stderr=True), is_quiet=quiet, transient=True) as bars:
        files = compute(recording, output, model or [], old=old, ref=ref, progress=bars.reach)
    if not quiet:
        steps, command = f"{len(files)} step{'s' if len(files) > 1 else ''}", f"rlzoo replay {shlex.quote(str(output))}"
        Plain().print(f"rescored {steps} into {output}; compare rules on them with: {command} --clip fspo,gspo,grpo")
