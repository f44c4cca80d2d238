"""Draws two games of a run on the task `guess`, before and after training, and marks the tokens on which the run trains.

    rlzoo train --config guess --clip fspo --output runs/guess
    python examples/lab/episode_picture.py runs/guess docs/images/episodes.svg

The first game in the picture is the first game lost in the first step. The second game, from the last step, is the first win
that took more than four turns and began with at least as wide a range as the first game.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from html import escape
from pathlib import Path
from typing import Any

from rlzoo.config.run_config import RunConfig
from rlzoo.journal.rollout_file import RolloutFile
from rlzoo.models.pretrained import load_named

COLUMNS, CELL, LINE, MARGIN = 84, 8.4, 24, 16
END = "\u21b5"  # symbol for the token that ends a turn
MODEL, ENVIRONMENT, MUTED = "#bcd6f7", "#f1f1f1", "#666666"
FONT = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def width(row: dict[str, Any]) -> int:
    """Return the width of a game's initial range."""
    low, high = map(int, re.findall(r"\d+", row["opening"]))
    return high - low


def games(run: Path) -> list[tuple[int, int, dict[str, Any]]]:
    """Return, for each of the two games to draw, its step, its index within the step, and its row in the step's file."""
    files = sorted((run / "rollouts").glob("*.jsonl"))
    first, last = ([json.loads(line) for line in file.read_text().splitlines()] for file in (files[0], files[-1]))
    lost = next(index for index, row in enumerate(first) if row["reward"] < 0)
    won = next(
        i for i, row in enumerate(last) if row["reward"] > 0 and len(row["turns"]) > 4 and width(row) >= width(first[lost])
    )
    return [(int(files[0].stem), lost, first[lost]), (int(files[-1].stem), won, last[won])]


def tokens(run: Path, step: int, index: int) -> list[tuple[str, bool]]:
    """Return the tokens of a game as text and, for each token, whether the model generated it."""
    config = RunConfig.compose([run / "config.yaml"])
    _, tokenizer = load_named(config.model)
    kept = RolloutFile.load(run / "rollouts" / f"{step:06d}.safetensors")
    ids, chosen = (
        values.split(kept.sequence_lengths.tolist())[index].tolist() for values in (kept.token_ids, kept.response_mask)
    )
    return [(tokenizer.decode([token]), is_model) for token, is_model in zip(ids, chosen, strict=True)]


def drawn(found: list[tuple[str, bool]], top: float) -> tuple[list[str], float]:
    """Return the tokens as SVG elements below ``top``, and the y coordinate below them. Lines break only between speakers."""
    parts, column = [], 0
    for chosen, run in itertools.groupby(found, key=lambda token: token[1]):
        texts = [text.replace("<eos>", END) for text, _ in run]
        if column + sum(map(len, texts)) > COLUMNS:
            column, top = 0, top + LINE
        for text in texts:
            x, size = MARGIN + column * CELL, len(text) * CELL - 0.8
            fill, weight = (MODEL, ' font-weight="bold"') if chosen else (ENVIRONMENT, "")
            shown = escape(text).replace(" ", "&#160;")
            parts.append(f'<rect x="{x:.1f}" y="{top:.1f}" width="{size:.1f}" height="18" rx="2" fill="{fill}"/>')
            parts.append(f'<text x="{x:.1f}" y="{top + 13.5:.1f}" textLength="{size:.1f}"{weight}>{shown}</text>')
            column += len(text)
    return parts, top + LINE


def main(run: Path, target: Path) -> None:
    """Draw the picture."""
    parts, top = [], float(MARGIN)
    for name, step, index, row in [(name, *game) for name, game in zip(("Before", "After"), games(run), strict=True)]:
        found = tokens(run, step, index)
        chosen = sum(is_chosen for _, is_chosen in found)
        paid = f"reward {row['reward']:.2f} after {len(row['turns'])} turns"
        about = f"step {step}: {paid}; {chosen} of {len(found)} tokens are trained on"
        parts.append(f'<text x="{MARGIN}" y="{top + 12}"><tspan font-weight="bold">{name}</tspan>, {about}</text>')
        made, top = drawn(found, top + LINE)
        parts += made
        top += LINE / 2
        print(f"{name}, {about}\n{row['response']}\n")
    for place, (fill, text) in enumerate(
        (
            (MODEL, f"the model's ({END} ends a turn): mask 1"),
            (ENVIRONMENT, "the environment's: mask 0, context only"),
        )
    ):
        x = MARGIN + place * 340
        parts.append(f'<rect x="{x}" y="{top}" width="18" height="18" rx="2" fill="{fill}"/>')
        parts.append(f'<text x="{x + 26}" y="{top + 13.5}" fill="{MUTED}">{text}</text>')
    size = (2 * MARGIN + COLUMNS * CELL, top + LINE + MARGIN / 2)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]:.0f} {size[1]:.0f}"'
    body = "\n".join(['<rect width="100%" height="100%" fill="white"/>', *parts])
    target.write_text(f'{head} font-family="{FONT}" font-size="13.5">\n{body}\n</svg>\n')


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
