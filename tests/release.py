"""Reports problems that prevent a release of this checkout: ``python -m tests.release [TAG]`` exits with 1 if there are any.

`nox -s release` runs this first, and then builds, installs and trains. Nothing here publishes.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from datetime import date
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
PLACEHOLDERS = r"github\.com/OWNER/|^PUBLISHED = False|FAMILY-NAME|YYYY-MM-DD"
HEADING = re.compile(r"^## (?P<version>\S+)(?: \((?P<date>[^)]*)\))?$", re.MULTILINE)


def problems(root: Path = ROOT, tag: str | None = None) -> list[str]:
    """Return one line for each task that remains before a release.

    Args:
        root: the checkout.
        tag: the tag to release; None if there is none yet.
    """
    version = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    citation = yaml.safe_load((root / "CITATION.cff").read_text(encoding="utf-8"))
    headings = list(HEADING.finditer((root / "CHANGELOG.md").read_text(encoding="utf-8")))
    newest = headings[0] if headings else None
    found = []
    if changed := _git(root, "status", "--porcelain"):
        found.append(f"{len(changed.splitlines())} files are not committed: commit or remove them")
    for file in _with_placeholders(root):
        found.append(f"{file}: placeholders are left; fill them in (CONTRIBUTING.md, Release)")
    if str(citation.get("version")) != version:
        found.append(f"CITATION.cff: version {citation.get('version')}, but {version} in pyproject.toml")
    if newest is None or newest["version"] != version:
        first = newest[0] if newest else "none"
        found.append(f"CHANGELOG.md: its first heading is {first!r}; make it '## {version} ({date.today()})'")
    elif (released := _date(newest["date"])) is None:
        found.append(f"CHANGELOG.md: {newest[0]!r} has no date; make it '## {version} ({date.today()})'")
    elif released > date.today():
        found.append(f"CHANGELOG.md: {version} is dated {released}, which is in the future")
    elif _date(citation.get("date-released")) != released:
        found.append(f"CITATION.cff: date-released is {citation.get('date-released')}, but {released} in CHANGELOG.md")
    if any(heading["version"].lower() == "unreleased" for heading in headings[1:]):
        found.append("CHANGELOG.md: lines under 'Unreleased' are left over below a release")
    if tag is None and _git(root, "tag", "--list", f"v{version}"):
        found.append(f"the tag v{version} exists already: raise the version in pyproject.toml, CITATION.cff and CHANGELOG.md")
    if tag not in (None, f"v{version}"):
        found.append(f"the tag {tag} is not v{version}, the version in pyproject.toml")
    return found


def _with_placeholders(root: Path) -> list[str]:
    search = ["git", "-C", str(root), "grep", "-lE", PLACEHOLDERS, "--", ".", ":!CONTRIBUTING.md", ":!tests"]
    return subprocess.run(search, capture_output=True, text=True, check=False).stdout.splitlines()  # exit code 1: none


def _date(text: object) -> date | None:
    try:
        return date.fromisoformat(str(text))
    except ValueError:
        return None


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    lines = problems(tag=next(iter(sys.argv[1:]), None))
    print("\n".join(lines) or "versions, dates and tags agree, and everything is committed")
    sys.exit(1 if lines else 0)
