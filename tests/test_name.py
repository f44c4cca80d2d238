"""The name on the package index: no file asks pip for `rlzoo`, which is another project there."""

import os
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

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

NAME = "rlzoo"
OLD = [
    f"pip install {NAME}",
    f"pip install -U {NAME} trl && python train.py",
    f"python -m pip install '{NAME}'",
    f'pip install --no-deps "{NAME}"',
    f"uv add {NAME}",
    f"pip install '{NAME}[math-verify]'",
    f"needs DeepSpeed: {NAME}[deepspeed]",
    f'dependencies = ["{NAME}>=0.1"]',
    f'dependencies = ["{NAME}>=$version"]',
    f'dependencies = [\n  "torch",\n  "{NAME}",\n]',
    f"{NAME}==1.0.4",
    f"https://pypi.org/project/{NAME}",
    f"importlib.metadata.version('{NAME}')",
]
OURS = [
    "pip install rlzoo-llm",
    "pip install 'rlzoo-llm[math-verify,datasets]'",
    "pip install -e rlzoo-my-rule && rlzoo train --clip my-rule",
    "pip install ./examples/rlzoo-soft-gate",
    "`pip install nox` and then rlzoo train",
    "pip uninstall rlzoo",
    'dependencies = ["rlzoo-llm>=0.2"]',
    "https://pypi.org/project/rlzoo-llm",
    'only-include = ["rlzoo", "plugins"]',
    "if module == 'rlzoo' or rlzoo.__file__ is None:",
]


@pytest.mark.parametrize("text", OLD)
def test_a_line_that_asks_for_the_other_project_is_found(text):
    assert ASKED.search(text)


@pytest.mark.parametrize("text", OURS)
def test_a_line_that_does_not_ask_for_it_is_left_alone(text):
    assert ASKED.search(text) is None


def files():
    """Return the files of the checkout, without the folders that git ignores."""
    ignored = [".git", *(line.rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines() if line.endswith("/"))]
    for folder, below, names in os.walk(ROOT):
        below[:] = [name for name in below if not any(fnmatch(name, pattern) for pattern in ignored)]
        yield from (Path(folder, name) for name in names)


def test_no_file_asks_for_the_other_project():
    searched, found = set(), []
    for file in files():
        if file == Path(__file__):
            continue
        text, name = file.read_bytes().decode(errors="replace"), file.relative_to(ROOT).as_posix()
        searched.add(name)
        found += [f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}" for match in ASKED.finditer(text)]
    assert {"README.md", "noxfile.py", ".ci/run", "rlzoo/cli/assets/new/pyproject.toml.txt"} <= searched
    assert found == []
