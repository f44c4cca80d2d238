"""Writes the parts of the documentation that come from the code; with --check, only says which are out of date.

A part stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``, in README.md, a plugin's README.md or a page of docs.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from rlzoo.cli.clips import settings
from rlzoo.composition import config_names
from rlzoo.config import RunConfig
from rlzoo.zoo import load_zoo

ROOT = Path(__file__).resolve().parents[1]
PART = re.compile(r"(<!-- generated: (?P<name>[\w /-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def zoo_table() -> str:
    """One row per policy."""
    rows = ["| policy | what it does | scope | advantage | paper |", "|---|---|---|---|---|"]
    for name, policy in load_zoo().items():
        line = (inspect.getdoc(policy) or "").partition("\n")[0]
        link = f"[`{name}`](plugins/{policy.__module__}/README.md)"
        rows.append(f"| {link} | {line} | {policy.scope} | {policy().advantage} | {policy.paper} |")
    return "\n".join(rows)


def parameters(name: str) -> str:
    """A policy's settings."""
    rows = ["| setting | default | allowed | meaning |", "|---|---|---|---|"]
    for field in settings(load_zoo()[name]):
        default = "null" if field["default"] is None else field["default"]
        rows.append(f"| `clip.{field['name']}` | {default} | {field['allowed']} | {field['description']} |")
    return "\n".join(rows)


def watch(name: str) -> str:
    """The metrics to watch with a policy."""
    return "\n".join(f"- `{metric}`: {text}." for metric, text in load_zoo()[name].watch.items())


def docstring(name: str) -> str:
    """A policy's docstring, as `rlzoo clips show` prints it."""
    return f"```text\n{inspect.getdoc(load_zoo()[name])}\n```"


def command_line() -> str:
    """The command line's help, by Typer's own generator."""
    command = [sys.executable, "-m", "typer", "rlzoo.cli.app", "utils", "docs", "--name", "rlzoo"]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()


def configuration() -> str:
    """Every key of a run's configuration but those of the policy and the task."""
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *_keys(RunConfig, "")])


def _keys(section: type[BaseModel], prefix: str) -> list[str]:
    rows = []
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel) and f"{prefix}{name}" not in ("clip", "task"):
            rows += _keys(inner, f"{prefix}{name}.")
        else:
            rows.append(f"| `{prefix}{name}` | {_shown(field.default)} | {field.description} |")
    return rows


def _shown(default: object) -> str:
    return "" if default is PydanticUndefined else "null" if default is None else str(default)


def part(name: str) -> str:
    """The text of one generated part."""
    kind, _, argument = name.partition(" ")
    makers = {"parameters": parameters, "docstring": docstring, "watch": watch}
    if kind in makers:
        return makers[kind](argument)
    plain = {"zoo": zoo_table, "command-line": command_line, "configuration": configuration}
    return plain[name]() if name in plain else ", ".join(f"`{config}`" for config in config_names())


def main() -> int:
    """Bring every page up to date, or with --check say which are not."""
    stale = []
    plugins = sorted((ROOT / "plugins").glob("*/README.md"))
    for page in [ROOT / "README.md", *plugins, *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        fresh = PART.sub(lambda match: f"{match[1]}{part(match['name'])}\n{match[3]}", text)
        if fresh != text:
            stale.append(str(page.relative_to(ROOT)))
            if "--check" not in sys.argv:
                page.write_text(fresh, encoding="utf-8")
    print("\n".join(stale) or "everything generated is up to date")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
