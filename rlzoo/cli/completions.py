"""Some of the responses that a run has just sampled, as `rlzoo train --show-completions` prints them."""

from __future__ import annotations

import json
import random
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from rlzoo.cli.console import printable
from rlzoo.support.reading import RECORDS, read_text

LONGEST = 1000  # characters of a question or a response that are printed


def is_due(step: int, steps: int) -> bool:
    """Whether to print some after this step: the first, the last, and every tenth of the run."""
    return step in (1, steps) or (step > 0 and step % max(1, steps // 10) == 0)


def completions(run: Path, step: int, number: int) -> RenderableType:
    """Some of the responses of one step, drawn at random, the same ones every time: question, response and reward."""
    file = run / "rollouts" / f"{step:06d}.jsonl"
    try:
        rows = [json.loads(line) for line in read_text(file, RECORDS).split("\n") if line]
        shown = Table(box=None, show_header=False, pad_edge=False)
        shown.add_column(no_wrap=True, style="dim")
        shown.add_column(overflow="fold")
        for index in sorted(random.Random(step).sample(range(len(rows)), min(number, len(rows)))):
            row = rows[index]
            length = f"{row['length']} tokens{'' if row['finished'] else ', cut off'}"
            about = f"reward {row['reward']:g}, {length}, response {index + 1} of {len(rows)}"
            shown.add_row(Text(f"step {step}", "not dim bold"), about)
            shown.add_row("question", _cut(row["question"]))
            shown.add_row("response", _cut(row["response"]))
            shown.add_row()
    except (OSError, ValueError, LookupError, TypeError) as error:  # not a reason to end a run
        return f"the responses of step {step} cannot be shown: {printable(str(error))}"
    return shown


def _cut(text: str) -> Text:
    """A text that a model or a data set wrote: plain, without control characters, and not too long."""
    more = f" ... {len(text) - LONGEST:,} more characters" if len(text) > LONGEST else ""
    return Text(f"{printable(text[:LONGEST].strip(), keep=chr(10))}{more}")
