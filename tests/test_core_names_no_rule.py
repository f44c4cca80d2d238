"""The core refers to no algorithm: outside the command line, its source contains no name of a bundled rule."""

import re
from pathlib import Path

import pytest

from rlzoo import load_zoo

ROOT = Path(__file__).resolve().parents[1] / "rlzoo"
WORDS = {"real", "rec", "up"}  # rules whose names are also words or parts of words
RULES = sorted({*load_zoo(), "dapo"} - WORDS)
NAMED = re.compile(rf"(?<![a-z])(?:{'|'.join(map(re.escape, RULES))})(?![a-z])", re.IGNORECASE)
FILES = [file for file in sorted(ROOT.rglob("*.py")) if file.relative_to(ROOT).parts[0] != "cli"]
EXCEPTIONS = {"integrations/trl.py"}  # TRL names its trainer and its losses after algorithms


@pytest.mark.parametrize("text", ['"fspo/width_low:0.02"', "_DAPO_BEFORE", "# as in GSPO-token", "dr_grpo"])
def test_the_pattern_matches_a_rule_name(text):
    assert NAMED.search(text)


def test_the_core_names_no_rule():
    assert len(FILES) > 100
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in FILES
        if str(file.relative_to(ROOT)) not in EXCEPTIONS
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if NAMED.search(line)
    ]
    assert not found, "\n".join(found)
