"""Prints responses from a run as text, with their questions or, for episodes, with the turns and their rewards.

python examples/show_completions.py RUN            the newest step
python examples/show_completions.py RUN --step 1 --number 3
"""

import argparse
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def lines(row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (author, text) pairs."""
    if not row.get("turns"):
        yield from (("question", row["question"]), ("response", row["response"]))
        return
    yield "environment", row["opening"]
    for turn in row["turns"]:
        paid = f"  [reward {turn['reward']:g}]" if turn["reward"] else ""
        yield "model", f"{turn['text'].strip() or '(nothing)'}{paid}"
        if turn["observation"]:
            yield "environment", turn["observation"]


def main() -> None:
    """Print randomly chosen responses from one step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", type=Path, help="run directory")
    parser.add_argument("--step", type=int, help="step whose responses are printed; default: the newest")
    parser.add_argument("--number", type=int, default=1, help="how many responses to print")
    options = parser.parse_args()
    step = options.step or max(int(file.stem) for file in (options.run / "rollouts").glob("*.jsonl"))
    text = (options.run / "rollouts" / f"{step:06d}.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.split("\n") if line]
    for index in sorted(random.Random(step).sample(range(len(rows)), min(options.number, len(rows)))):
        row = rows[index]
        grade = "no grade" if row["reward"] is None else f"reward {row['reward']:g}"
        turns = f", {len(row['turns'])} turns" if row.get("turns") else ""
        print(f"{f'step {step}':<12} {grade}, {row['length']} tokens{turns}, response {index + 1} of {len(rows)}")
        for who, said in lines(row):
            print(f"{who:<12} {ascii(said.strip())[1:-1]}")  # control characters would reach the terminal


if __name__ == "__main__":
    main()
