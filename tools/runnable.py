"""Runs the commands of the documentation that say they can be run, page by page, each page in an empty folder.

A block is run when the line before its fence is ``<!-- runnable -->``: by bash, or by Python if the fence says so. A block
after ``<!-- file: NAME -->`` is written to that file. The blocks of a page share its folder and run in their order.
``python -m tools.runnable [PAGE...]`` takes the pages as the repository has them; without any, all that the navigation names.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tools.pages import ROOT, home, navigation, sources

LIMIT = 600.0
"""Seconds that one block may take."""
MARKED = re.compile(
    r"^<!-- (?:runnable|file: (?P<file>[\w./-]+)) -->\n(?P<fence>```+)(?P<language>\w*)\n(?P<text>.*?)^(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A marked block: the line of its fence, what it is, and for a file its name."""

    line: int
    text: str
    language: str
    file: str | None

    @property
    def command(self) -> list[str]:
        """What runs it."""
        python = self.language == "python"
        return [sys.executable, "-c", self.text] if python else ["bash", "-euo", "pipefail", "-c", self.text]


def marked(text: str) -> list[Block]:
    """The marked blocks of a page."""
    return [
        Block(text.count("\n", 0, match.start()) + 2, match["text"], match["language"], match["file"])
        for match in MARKED.finditer(text)
    ]


def run_page(page: Path, limit: float = LIMIT) -> bool:
    """Run a page's blocks in an empty folder and print each with its time; whether all went well."""
    blocks = marked(page.read_text(encoding="utf-8"))
    name = page.relative_to(ROOT) if page.is_relative_to(ROOT) else page
    with tempfile.TemporaryDirectory(prefix="rlzoo-docs-") as folder:
        for block in blocks:
            if block.file is not None:
                (Path(folder) / block.file).write_text(block.text, encoding="utf-8")
                continue
            start = time.monotonic()
            problem, output = _run(block, folder, limit)
            first = block.text.strip().partition("\n")[0]
            print(f"{problem or 'ran'} {name}:{block.line} in {time.monotonic() - start:.1f} s: {first}", flush=True)
            if problem:
                print(block.text + output, flush=True)
                return False  # what follows builds on it
    return True


def _run(block: Block, folder: str, limit: float) -> tuple[str | None, str]:
    """What went wrong, or None, and what the block printed."""
    process = subprocess.Popen(
        block.command,
        cwd=folder,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with what it started
        return f"stopped after {limit:g} s:", process.communicate()[0]
    return (f"FAILED (exit code {process.returncode})" if process.returncode else None), output


def pages() -> list[Path]:
    """The pages in the order of the navigation."""
    places = {home(source): source for source in sources()}
    return [ROOT / places[place] for place in navigation() if place in places]


def main(names: list[str]) -> int:
    """Run the pages named, or all; exit code 1 if a block failed, or there was none."""
    chosen = [Path(name).resolve() for name in names] or pages()
    blocks = sum(block.file is None for page in chosen for block in marked(page.read_text(encoding="utf-8")))
    wrong = [page for page in chosen if not run_page(page)]
    print(f"{blocks} blocks marked runnable; pages that failed: {len(wrong)}")
    return 1 if wrong or not blocks else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
