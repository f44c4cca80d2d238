"""SECURITY.md names a test for every defence, and all of these tests exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def rows():
    lines = (ROOT / "SECURITY.md").read_text(encoding="utf-8").splitlines()
    start = lines.index("| asset | threat | defence | test |") + 2
    for line in lines[start:]:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split(" | ")]


def test_every_threat_has_a_defence_and_a_test_that_exists():
    assert len([*rows()]) >= 15
    for asset, threat, defence, tests in rows():
        assert asset, threat
        assert defence, threat
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", tests)
        assert named, threat
        for file, name in named:
            assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{name}"


def test_the_links_lead_somewhere():
    for page in (ROOT / "SECURITY.md", ROOT / "docs" / "how-to" / "stay-safe.md"):
        for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), target
