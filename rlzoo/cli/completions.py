"""Formats sampled responses for `rlzoo train --show-completions`."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from rlzoo.support.printable import printable
from rlzoo.support.reading import RECORDS, read_text

LONGEST = 1000  # maximum number of characters to print for a question or a response


def is_due(step: int, steps: int) -> bool:
    """Return whether to print completions after this step: after the first step, the last step, and each tenth of the run."""
    return step in (1, steps) or (step > 0 and step % max(1, steps // 10) == 0)


def completions(run: Path, step: int, number: int) -> RenderableType:
    """Return randomly chosen responses from one step, with their questions and rewards; the choice depends only on the step."""
    file = run / "rollouts" / f"{step:06d}.jsonl"
    try:
        rows = [json.loads(line) for line in read_text(file, RECORDS).split("\n") if line]
        shown = Table(box=None, show_header=False, pad_edge=False)
        shown.add_column(no_wrap=True, style="dim")
        shown.add_column(overflow="fold")
        for index in sorted(random.Random(step).sample(range(len(rows)), min(number, len(rows)))):
            row = rows[index]
            length = f"{row['length']} tokens{'' if row['finished'] else ', cut off'}"
            turns = row.get("turns", [])
            played = f", {len(turns)} turn{'s' if len(turns) > 1 else ''}" if turns else ""
            grade = "no grade" if row["reward"] is None else f"reward {row['reward']:g}"
            about = f"{grade}, {length}{played}, response {index + 1} of {len(rows)}"
            shown.add_row(Text(f"step {step}", "not dim bold"), about)
            for who, text in _lines(row, turns):
                shown.add_row(who, _cut(text))
            shown.add_row()
    except (OSError, ValueError, LookupError, TypeError) as error:  # the run continues
        return f"the responses of step {step} cannot be shown: {printable(str(error))}"
    return shown


def _lines(row: dict[str, Any], turns: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield (author, text) pairs: question and response, or the turns of an episode with their rewards."""
    if not turns:
        yield from (("question", row["question"]), ("response", row["response"]))
        return
    yield "environment", row["opening"]
    for turn in turns:
        paid = f"  [reward {turn['reward']:g}]" if turn["reward"] else ""
        yield "model", f"{turn['text'].strip() or '(nothing)'}{paid}"
        if turn["observation"]:
            yield "environment", turn["observation"]
    if "failure" in row:
        yield "failed", row["failure"]


def _cut(text: str) -> Text:
    """Escape control characters in text from a model or a data set, and truncate it to `LONGEST` characters."""
    more = f" ... {len(text) - LONGEST:,} more characters" if len(text) > LONGEST else ""
    return Text(f"{printable(text[:LONGEST].strip(), keep=chr(10))}{more}")
