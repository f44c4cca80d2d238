"""Runs the commands of the documentation that say they can be run, page by page, each page in an empty folder.

A block is run when the line before its fence is ``<!-- runnable -->``: by bash, or by Python if the fence says so. A block
after ``<!-- file: NAME -->`` is written to that file. The blocks of a page share its folder and run in their order.
``python -m tools.runnable [--steps N] [PAGE...]`` takes the pages as the repository has them; without any, all that the
navigation names. With ``--steps``, every ``rlzoo train`` is that short.
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

    def command(self, steps: int | None) -> list[str]:
        """What runs it, every ``rlzoo train`` in it for so many steps; None for what it says."""
        if self.language == "python":
            return [sys.executable, "-c", self.text]
        shorter = f'rlzoo() {{ if [ "$1" = train ]; then set -- "$@" --steps {steps}; fi; command rlzoo "$@"; }}\n'
        return ["bash", "-euo", "pipefail", "-c", (shorter if steps else "") + self.text]


def marked(text: str) -> list[Block]:
    """The marked blocks of a page."""
    return [
        Block(text.count("\n", 0, match.start()) + 2, match["text"], match["language"], match["file"])
        for match in MARKED.finditer(text)
    ]


def run_page(page: Path, limit: float = LIMIT, steps: int | None = None) -> bool:
    """Run a page's blocks in an empty folder and print each with its time; whether all went well.

    Args:
        page: its file.
        limit: seconds for a block.
        steps: what every ``rlzoo train`` is given as ``--steps``; None for what the page says.
    """
    blocks = marked(page.read_text(encoding="utf-8"))
    name = page.relative_to(ROOT) if page.is_relative_to(ROOT) else page
    with tempfile.TemporaryDirectory(prefix="rlzoo-docs-") as folder:
        for block in blocks:
            if block.file is not None:
                (Path(folder) / block.file).write_text(block.text, encoding="utf-8")
                continue
            start = time.monotonic()
            problem, output = _run(block, folder, limit, steps)
            first = block.text.strip().partition("\n")[0]
            print(f"{problem or 'ran'} {name}:{block.line} in {time.monotonic() - start:.1f} s: {first}", flush=True)
            if problem:
                print(block.text + output, flush=True)
                return False  # what follows builds on it
    return True


def _run(block: Block, folder: str, limit: float, steps: int | None) -> tuple[str | None, str]:
    """What went wrong, or None, and what the block printed."""
    process = subprocess.Popen(
        block.command(steps),
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
    steps = int(names[1]) if names[:1] == ["--steps"] else None
    names = names if steps is None else names[2:]
    chosen = [Path(name).resolve() for name in names] or pages()
    blocks = sum(block.file is None for page in chosen for block in marked(page.read_text(encoding="utf-8")))
    wrong = [page for page in chosen if not run_page(page, steps=steps)]
    print(f"{blocks} blocks marked runnable; pages that failed: {len(wrong)}")
    return 1 if wrong or not blocks else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
