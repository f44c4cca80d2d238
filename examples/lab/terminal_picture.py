"""Draws the display of `rlzoo train` half-way through the default run, on a terminal of 80 columns, by running it.

python examples/lab/terminal_picture.py docs/images/train-terminal.svg
"""

import io
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT

import rlzoo
from rlzoo.cli.console import Plain
from rlzoo.cli.progress import Screen

STEP = 24  # of 40
FONTS = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
# no fonts from another server: a picture in a page must not fetch anything
FORMAT = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace("Fira Code, monospace", FONTS)


def main() -> None:
    console = Plain(file=io.StringIO(), record=True, force_terminal=True, color_system="standard", width=80, height=24)
    console.print("$ rlzoo train --clip fspo")
    with tempfile.TemporaryDirectory() as folder:
        config = rlzoo.RunConfig.compose(clip="fspo", overrides=["tracking.mlflow=false"], output=Path(folder) / "run")
        display = Screen(console, f"fspo on {config.task.name}, model {config.model.path}, seed {config.seed}", config.steps)

        def observe(step: int, metrics: Mapping[str, float]) -> None:
            if step <= STEP:
                display.show(step, metrics)
            if step == STEP:
                console.print(display.get_renderable())

        rlzoo.train(config, observe)
    console.save_svg(sys.argv[1], title="rlzoo train", code_format=FORMAT, unique_id="train")


if __name__ == "__main__":
    main()
