"""Trains with the default settings and draws the final output of `rlzoo train` on an 80-column terminal.

python examples/lab/terminal_picture.py docs/images/train-terminal.svg
"""

import io
import re
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT

import rlzoo
from rlzoo.cli.chart import clip_by_length
from rlzoo.cli.console import Plain
from rlzoo.cli.progress import Curves

FONTS = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
# use no fonts from another server, because a picture on a page must not load anything
FORMAT = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace("Fira Code, monospace", FONTS)


def main() -> None:
    console = Plain(file=io.StringIO(), record=True, force_terminal=True, color_system="standard", width=80, height=40)
    console.print("$ rlzoo train --clip fspo")
    curves, started = Curves(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        config = rlzoo.RunConfig.compose(clip="fspo", overrides=["tracking.mlflow=false"], output=Path(folder) / "run")
        result = rlzoo.train(config, lambda step, metrics: curves.add(metrics))
        accuracies = [row["eval/accuracy"] for row in result.metrics if "eval/accuracy" in row]
    console.print(f"{config.clip.name} on {config.task.name}, model {config.model.path}, seed {config.seed}", style="bold")
    console.print(f"{config.steps} of {config.steps} steps in {timedelta(seconds=int(time.monotonic() - started))}")
    for line in curves.lines(console):
        console.print(line)
    console.print(f"held-out accuracy {accuracies[0]:.3f} -> {accuracies[-1]:.3f}")
    assert result.profile is not None, "a run that clips has a profile"
    console.print(clip_by_length(result.profile, console))
    console.save_svg(sys.argv[1], title="rlzoo train", code_format=FORMAT, unique_id="train")


if __name__ == "__main__":
    main()
