"""Mixes questions whose answers differ in length: sums (a few tokens), GSM8K and MATH (hundreds of tokens).

    python -m examples.lab.mixed_questions GSM8K MATH --number 100 > mixed.jsonl

GSM8K and MATH are files in JSON lines, such as ``gsm8k_train.jsonl`` and ``math500.jsonl``. The output has ``--number``
questions of each kind, as ``{"question": ..., "answer": ...}`` in JSON lines.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path


def rows(file: Path, number: int, rng: random.Random) -> list[dict[str, str]]:
    """Return some of a file's questions with their final answers."""
    found = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [
        {"question": row.get("question") or row["problem"], "answer": row["answer"].rpartition("#### ")[2]}
        for row in rng.sample(found, number)
    ]


def main() -> None:
    """Print the questions in random order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gsm8k", type=Path)
    parser.add_argument("math", type=Path)
    parser.add_argument("--number", type=int, default=100, help="questions of each kind (default: %(default)s)")
    given, rng = parser.parse_args(), random.Random(0)
    terms = [[rng.randint(100, 999) for _ in range(3)] for _ in range(given.number)]
    sums = [{"question": f"What is {' + '.join(map(str, row))}?", "answer": str(sum(row))} for row in terms]
    mixed = [*sums, *rows(given.gsm8k, given.number, rng), *rows(given.math, given.number, rng)]
    rng.shuffle(mixed)
    for row in mixed:
        print(json.dumps(row, ensure_ascii=False))


if __name__ == "__main__":
    main()
