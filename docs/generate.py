"""Writes the parts of the documentation that come from the code; with --check, only says which are out of date.

A part stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``, in README.md, a plugin's README.md or a page of docs.
The picture of the floors is drawn from their contract in pyproject.toml.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import tomllib
from html import escape
from pathlib import Path

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from rlzoo.cli.clips import settings
from rlzoo.config.composition import config_names
from rlzoo.config.run_config import RunConfig
from rlzoo.zoo import load_zoo

ROOT = Path(__file__).resolve().parents[1]
FLOORS = ROOT / "docs" / "images" / "floors.svg"
FLOOR_HEIGHT, LABEL, BOX, GAP = 40, 190, 128, 8  # of the picture, in pixels
FLOOR_NAMES = {
    "rlzoo.cli": "shows what happens",
    "rlzoo.lab": "races and replays",
    "rlzoo.planner": "plans a run",
    "rlzoo.engine": "runs it",
    "rlzoo.config": "describes a run",
    "rlzoo.config.sections": "settings, tasks, store",
    "rlzoo.measure.report": "one page of results",
    "rlzoo.analysis": "what numbers say",
    "rlzoo.testing": "holds rules to laws",
    "rlzoo.zoo": "looks rules up",
    "rlzoo.discovery": "finds plugins",
    "rlzoo.hookspecs": "the hook",
    "rlzoo.policy": "what a rule is",
    "rlzoo.ops": "pure functions",
    "rlzoo.types": "records and errors",
}
"""What the picture says beside a floor, by one of its modules."""
PART = re.compile(r"(<!-- generated: (?P<name>[\w /-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def zoo_table() -> str:
    """One row per policy."""
    rows = ["| policy | what it does | scope | advantage | paper |", "|---|---|---|---|---|"]
    for name, policy in load_zoo().items():
        line = (inspect.getdoc(policy) or "").partition("\n")[0]
        link = f"[`{name}`](plugins/{policy.__module__}/README.md)"
        rows.append(f"| {link} | {line} | {policy.scope} | {policy().advantage} | {policy.paper} |")
    return "\n".join(rows)


def rules() -> str:
    """One row per policy, for the site's first page."""
    rows = ["| rule | what it does | judges | paper |", "|---|---|---|---|"]
    for name, policy in load_zoo().items():
        line = (inspect.getdoc(policy) or "").partition("\n")[0]
        link = f"[`{name}`](../plugins/{policy.__module__}/README.md)"
        rows.append(f"| {link} | {line} | {policy.scope} | {policy.paper.removeprefix('arXiv ')} |")
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
    """The command line's help, by Typer's own generator; its title is the page's."""
    command = [sys.executable, "-m", "typer", "rlzoo.cli.app", "utils", "docs", "--name", "rlzoo"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return text.strip().removeprefix("# `rlzoo`").strip()


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
            rows.append(f"| `{prefix}{name}` | {_shown(field.default)} | {escape(field.description or '', quote=False)} |")
    return rows


def _shown(default: object) -> str:
    return "" if default is PydanticUndefined else "null" if default is None else str(default)


def floors() -> str:
    """A picture of the floors, the highest on top: the layers of import-linter's contract, and what the core may not import."""
    layers, core = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    rows = [re.split(r" [|:] ", layer) for layer in layers["layers"]]
    width, height = LABEL + max(map(len, rows)) * (BOX + GAP) + GAP, len(rows) * FLOOR_HEIGHT + GAP
    shapes = [f'<rect width="{width}" height="{height}" rx="8" fill="#f6f8fa"/>']
    for index, row in enumerate(rows):
        top = index * FLOOR_HEIGHT + GAP
        said = next((FLOOR_NAMES[module] for module in row if module in FLOOR_NAMES), "")
        colour = "#dbeafe" if set(row) & set(core["source_modules"]) else "#ffffff"
        shapes.append(f'<text x="{2 * GAP}" y="{top + 21}" fill="#57606a">{escape(said)}</text>')
        for place, module in enumerate(row):
            left = LABEL + place * (BOX + GAP)
            box = f'x="{left}" y="{top}" width="{BOX}" height="{FLOOR_HEIGHT - GAP}" rx="4" fill="{colour}" stroke="#8c959f"'
            shapes.append(f"<rect {box}/>")
            shapes.append(f'<text x="{left + BOX / 2:g}" y="{top + 21}" text-anchor="middle">{module}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">'
    return "\n".join([head, *shapes, "</svg>\n"])


def part(name: str) -> str:
    """The text of one generated part."""
    kind, _, argument = name.partition(" ")
    makers = {"parameters": parameters, "docstring": docstring, "watch": watch}
    if kind in makers:
        return makers[kind](argument)
    plain = {"zoo": zoo_table, "rules": rules, "command-line": command_line, "configuration": configuration}
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
    if not FLOORS.exists() or FLOORS.read_text(encoding="utf-8") != floors():
        stale.append(str(FLOORS.relative_to(ROOT)))
        if "--check" not in sys.argv:
            FLOORS.write_text(floors(), encoding="utf-8")
    print("\n".join(stale) or "everything generated is up to date")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
