"""The name on the package index: no file asks pip for `rlzoo`, which is another project there."""

import os
import re
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
THEIRS = r"(?<![\w./-])rlzoo"  # not the end of a path or of a longer name
ARGUMENTS = r"\b(?:(?!&&)[^\n`;|])*?"  # up to the end of the command
ASKED = re.compile(
    "|".join(
        (
            rf"\b(?:pip3?|pipx|uv tool) (?:install|download|wheel){ARGUMENTS}{THEIRS}(?![\w./-])",
            rf"\b(?:uv|poetry|pdm) add{ARGUMENTS}{THEIRS}(?![\w./-])",
            rf"{THEIRS}\[[a-z{{]",  # an extra
            rf"{THEIRS} ?(?:[<>=!~]=|[<>]) ?[\d{{$]",  # a version
            rf"(?i:\bdependencies\b)\W*\[[^\]]*[\"']{THEIRS}[\"']",
            r"pypi\.org/project/rlzoo(?![\w-])",
            r"\b(?:version|version_of|distribution|requires|metadata)\([\"']rlzoo[\"']\)",
        )
    )
)


def files():
    """Return the files of the checkout, without the folders that git ignores."""
    ignored = [".git", *(line.rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines() if line.endswith("/"))]
    for folder, below, names in os.walk(ROOT):
        below[:] = [name for name in below if not any(fnmatch(name, pattern) for pattern in ignored)]
        yield from (Path(folder, name) for name in names)


def test_no_file_requests_the_other_project():
    requests = []
    for file in files():
        if file == Path(__file__):
            continue
        text, name = file.read_bytes().decode(errors="replace"), file.relative_to(ROOT).as_posix()
        requests += [f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}" for match in ASKED.finditer(text)]
    assert requests == []
