"""Writes the generated parts of the documentation from the code; with --check, only reports parts that are out of date.

A generated part is between ``<!-- generated: NAME -->`` and ``<!-- end -->``, in README.md, a plugin's README.md or a page of
docs. The site's navigation lists a page for each plugin folder. The map of the package is drawn from its imports.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from html import escape
from pathlib import Path

import grimp
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from docs.scripts import formulas, races
from rlzoo import ops
from rlzoo.cli.fields import settings
from rlzoo.config.composition import config_names
from rlzoo.config.run_config import RunConfig
from rlzoo.core.advantages import AdvantageEstimator
from rlzoo.core.corrections import Correction
from rlzoo.core.types import ClipBand, ClipInputs, ClipResult
from rlzoo.core.zoo import Shelf, load_zoo
from rlzoo.gate.enter import TO_SAMPLE, TO_TRAIN
from rlzoo.learner.learner import Learner
from rlzoo.tasks import Task
from rlzoo.tasks.episodes import EnvironmentTask
from rlzoo.tasks.guess import GuessTask
from rlzoo.tasks.tools import ToolTask
from rlzoo.testing import LAWS
from rlzoo.training.loop import steps

ROOT = Path(__file__).resolve().parents[2]
MAP = ROOT / "docs" / "images" / "map.svg"
ROW_HEIGHT, BOX, GAP = 46, 132, 8  # of the map, in pixels
TASKS: dict[str, type[Task]] = {
    "environment": EnvironmentTask,
    "guess": GuessTask,
    "tools": ToolTask,
}
TOPICS = {
    "Learning rate and optimizer": (
        "learner.lr",
        "learner.schedule",
        "learner.warmup_updates",
        "learner.weight_decay",
        "learner.betas",
    ),
    "Batch size and group size": (
        "rollout.num_prompts",
        "rollout.group_size",
        "learner.num_minibatches",
        "learner.minibatch_by",
        "learner.ignore_equal_groups",
        "learner.num_epochs",
        "learner.max_tokens_per_micro_batch",
        "rollout.batch_size",
        "rollout.dynamic_sampling",
        "rollout.band",
        "rollout.measure_every",
    ),
    "Gradient clipping and skipped updates": ("learner.max_grad_norm", "learner.max_nonfinite", "learner.rollback_above"),
    "Critic": ("critic.*",),
    "KL penalty": ("learner.kl_*", "reward.kl_coef"),
    "Entropy bonus": ("learner.entropy_coef",),
    "Temperature and response length": (
        "rollout.temperature",
        "rollout.top_*",
        "rollout.max_new_tokens",
        "rollout.max_turn*",
        "rollout.max_obs*",
    ),
    "Reward": ("reward.weights", "reward.overlong_*", "reward.max_failed"),
    "Sampler and vLLM": (
        "rollout.engine",
        "rollout.graphs",
        "rollout.recorded",
        "rollout.recorded_epochs",
        "rollout.max_staleness",
        "correction",
        "rollout.vllm.*",
    ),
    "Rule, task and plugins": ("clip", "task", "plugins"),
    "Model": ("model.*",),
    "LoRA": ("learner.lora.*",),
    "Precision and memory": (
        "learner.autocast",
        "learner.tf32",
        "learner.master_weights",
        "learner.gradient_checkpointing",
        "learner.packing",
    ),
    "Evaluation": ("eval.*",),
    "Checkpoints": ("checkpoint.*",),
    "Tracking with MLflow": ("tracking.*",),
    "Processes, DeepSpeed, FSDP2 and offload": ("launch.*",),
    "Seed, steps and output": ("seed", "steps", "output"),
}
"""Sections of the configuration reference and their keys; the titles contain the words that readers search for."""
LOOPS = {"steps": steps, "accumulate": Learner.accumulate}
NAVIGATION = re.compile(r'(\{ "The rules" = \[\n).*?(    \] \},)', re.DOTALL)
PART = re.compile(r"(<!-- generated: (?P<name>[\w /-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def rules() -> str:
    """Return a table with one row per rule, for the site's first page."""
    rows = ["| rule | what it does | judges | paper |", "|---|---|---|---|"]
    for name, policy in load_zoo().items():
        line = (inspect.getdoc(policy) or "").partition("\n")[0]
        link = f"[`{name}`](../plugins/{policy.__module__}/README.md)"
        rows.append(f"| {link} | {line} | {policy.scope} | {policy.paper.removeprefix('arXiv ')} |")
    return "\n".join(rows)


def parts(shelf: Shelf[AdvantageEstimator] | Shelf[Correction], formulas: Mapping[str, str]) -> str:
    """Return a section for each estimator or correction: its docstring, with the formula as mathematics, and its settings."""
    sections = []
    for name, kind in shelf.items():
        also = ", ".join(
            f"`{alias}` ({', '.join(f'`{key}` = {value}' for key, value in preset.items())})"
            for alias, (of, preset) in shelf.aliases.items()
            if of == name
        )
        first, texts = docstring_sections(kind)
        sections.append(f"### {name}\n\n{first}\n\n{formulas[name].strip()}\n")
        sections += [f"*{title}:* {_flat(text)}\n" for title, text in texts.items() if title not in ("Formula", "Where")]
        if fields := settings(kind):
            rows = [f"| `{each['name']}` | {each['default']} | {each['allowed']} | {each['description']} |" for each in fields]
            sections.append("\n".join(["| setting | default | allowed | meaning |", "|---|---|---|---|", *rows, ""]))
        if also:
            sections.append(f"Aliases: {also}.\n")
    return "\n".join(sections).strip()


def parameters(name: str) -> str:
    """Return a table of a rule's settings."""
    return _settings("clip", load_zoo()[name])


def task(name: str) -> str:
    """Return a table of a task's settings, without the settings that all tasks share."""
    return _settings("task", TASKS[name], Task)


def _settings(section: str, kind: type[BaseModel], base: type[BaseModel] | None = None) -> str:
    rows = ["| setting | default | allowed | meaning |", "|---|---|---|---|"]
    common = {name: field.description for name, field in base.model_fields.items()} if base else {}
    for field in settings(kind):
        if common.get(field["name"]) == field["description"]:
            continue
        default = "" if kind.model_fields[field["name"]].is_required() else _shown(field["default"])
        rows.append(f"| `{section}.{field['name']}` | {default} | {field['allowed']} | {field['description']} |")
    return "\n".join(rows)


def arguments(name: str) -> str:
    """Return a table of the constructor arguments of a library's adapter."""
    module = importlib.import_module(f"rlzoo_{name}")
    (kind,) = (each for each in vars(module).values() if inspect.isclass(each) and each.__name__.lower() == name)
    described = dict(re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", inspect.getdoc(kind.__init__) or "", re.MULTILINE))
    rows = ["| setting | default | meaning |", "|---|---|---|"]
    for parameter in list(inspect.signature(kind).parameters.values()):
        is_open = parameter.kind is inspect.Parameter.VAR_KEYWORD
        setting = "others" if is_open else f"`task.arguments.{parameter.name}`"
        default = "" if is_open or parameter.default == "" else _shown(parameter.default)
        rows.append(f"| {setting} | {default} | {' '.join(described[parameter.name].split()).rstrip('.')} |")
    return "\n".join(rows)


def watch(name: str) -> str:
    """Return a list of the metrics to watch with a rule."""
    return "\n".join(f"- `{metric}`: {text}." for metric, text in load_zoo()[name].watch.items())


def docstring(name: str) -> str:
    """Return a rule's docstring as Markdown, with the formula as a code block and the other sections as paragraphs."""
    first, texts = docstring_sections(load_zoo()[name])
    formatted = (
        f"```text\n{text}\n```" if title == "Formula" else f"*{title}:* {_flat(text)}" for title, text in texts.items()
    )
    return "\n\n".join([f"**{first}**", *formatted])


def docstring_sections(kind: type) -> tuple[str, dict[str, str]]:
    """Return the first line of a docstring, and its sections by title."""
    first, *sections = re.split(r"^(\w[\w ]*):$", inspect.getdoc(kind) or "", flags=re.MULTILINE)
    return first.strip(), {title: inspect.cleandoc(text) for title, text in zip(sections[::2], sections[1::2], strict=True)}


def _flat(text: str) -> str:
    return " ".join(text.split())


def excerpt(name: str) -> str:
    """Return the source of the loop in a function in `LOOPS`, without indentation."""
    source = textwrap.dedent(inspect.getsource(LOOPS[name]))
    function = ast.parse(source)
    loop = next(node for node in ast.walk(function) if isinstance(node, ast.For))
    lines = source.splitlines()[loop.lineno - 1 : loop.end_lineno]
    return "```python\n" + textwrap.dedent("\n".join(lines)) + "\n```"


def command_line() -> str:
    """Return the command line's help from Typer's own generator, without its title."""
    command = [sys.executable, "-m", "typer", "rlzoo.cli.app", "utils", "docs", "--name", "rlzoo"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return text.strip().removeprefix("# `rlzoo`").strip()


def configuration() -> str:
    """Return a section for each topic with all keys of a run's configuration, except those of the rule and the task.

    Raises:
        ValueError: a key belongs to no topic or to several.
    """
    rows = dict(_keys(RunConfig, ""))
    sections, left = [], dict(rows)
    for title, patterns in TOPICS.items():
        keys = [key for key in rows if any(fnmatchcase(key, pattern) for pattern in patterns)]
        if not keys or not left.keys() >= set(keys):
            raise ValueError(f"TOPICS[{title!r}] matches no key, or a key of another topic: {keys}")
        table = ["| key | default | meaning |", "|---|---|---|", *(left.pop(key) for key in keys)]
        sections.append("\n".join([f"### {title}\n", *table]))
    if left:
        raise ValueError(f"no topic has {', '.join(left)}: add them to TOPICS")
    return "\n\n".join(sections)


def _keys(section: type[BaseModel], prefix: str) -> list[tuple[str, str]]:
    rows = []
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel) and f"{prefix}{name}" not in ("clip", "task"):
            rows += _keys(inner, f"{prefix}{name}.")
        else:
            meaning = escape(field.description or "", quote=False)
            rows.append((f"{prefix}{name}", f"| `{prefix}{name}` | {_shown(field.default)} | {meaning} |"))
    return rows


def _shown(default: object) -> str:
    return "" if default is PydanticUndefined else "null" if default is None else str(default)


def imports() -> dict[str, set[str]]:
    """Return the folders and modules directly in ``rlzoo``, each with its imports, including imports for type checkers."""
    graph = grimp.build_graph("rlzoo", cache_dir=None)
    units = {child.removeprefix("rlzoo."): set[str]() for child in graph.find_children("rlzoo")}
    units.pop("__main__")
    for module in graph.modules:
        importer = module.split(".")[1:2]
        for imported in graph.find_modules_directly_imported_by(module):
            target = imported.split(".")[1:2]
            if importer and target and importer != target and importer[0] in units:
                units[importer[0]].add(target[0])
    return units


def levels(units: Mapping[str, set[str]]) -> list[list[str]]:
    """Arrange the units in rows so that each imports only from lower rows; the highest row is first.

    Raises:
        ValueError: there is a cycle.
    """
    rows: list[list[str]] = []
    left = dict(units)
    while left:
        row = sorted(unit for unit, imported in left.items() if not imported & left.keys())
        if not row:
            raise ValueError(f"a cycle among {sorted(left)}")
        rows.insert(0, row)
        left = {unit: imported for unit, imported in left.items() if unit not in row}
    return rows


def structure() -> str:
    """Return a table with one row per folder or module: its purpose and its imports."""
    units = imports()
    rows = ["| part | what it is | imports |", "|---|---|---|"]
    for unit in (unit for row in levels(units) for unit in row):
        doc = (importlib.import_module(f"rlzoo.{unit}").__doc__ or "").partition("\n")[0].rstrip(".")
        rows.append(f"| `{unit}` | {doc} | {', '.join(sorted(units[unit])) or 'nothing'} |")
    return "\n".join(rows)


def draw_map() -> str:
    """Draw a map of the package, in which every part imports only from rows below its own and the core is blue."""
    rows = levels(imports())
    width, height = max(map(len, rows)) * (BOX + GAP) + GAP, len(rows) * ROW_HEIGHT + GAP
    shapes = [f'<rect width="{width}" height="{height}" rx="8" fill="#f6f8fa"/>']
    for index, row in enumerate(rows):
        top, margin = index * ROW_HEIGHT + GAP, (width - len(row) * (BOX + GAP) + GAP) / 2
        for place, unit in enumerate(row):
            colour = "#dbeafe" if unit == "core" else "#ffffff"
            left = margin + place * (BOX + GAP)
            box = (
                f'x="{left:g}" y="{top}" width="{BOX}" height="{ROW_HEIGHT - 2 * GAP}" rx="4" fill="{colour}" stroke="#8c959f"'
            )
            shapes.append(f"<rect {box}/>")
            shapes.append(f'<text x="{left + BOX / 2:g}" y="{top + 20}" text-anchor="middle">{unit}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">'
    return "\n".join([head, *shapes, "</svg>\n"])


def laws() -> str:
    """Return a table with one row per law of a rule."""
    rows = ["| | law | statement |", "|---|---|---|"]
    for number, law in enumerate(LAWS, start=1):
        rows.append(f"| {number} | `{law.name}` | {law.statement} |")
    return "\n".join(rows)


def gate() -> str:
    """Return a table with one row per check that is made before the first step."""
    asked = {True: "train, eval", False: "train"}
    rows = ["| | what is checked | by |", "|---|---|---|"]
    rows += [f"| `{each.__name__}` | {inspect.getdoc(each)} | {asked[each in TO_SAMPLE]} |" for each in TO_TRAIN]
    return "\n".join(rows)


def functions() -> str:
    """Return a table with one row per function of `rlzoo.core.ops`: its signature and its description."""
    rows = ["| function | description |", "|---|---|"]
    for name, function in inspect.getmembers(ops, inspect.isfunction):
        if function.__module__ == ops.__name__ and not name.startswith("_"):
            given = ", ".join(_parameter(each) for each in inspect.signature(function).parameters.values())
            paragraph = (inspect.getdoc(function) or "").partition("\n\n")[0]
            rows.append(f"| `ops.{name}({given})` | {' '.join(paragraph.split()).replace('|', '&#124;')} |")
    return "\n".join(rows)


def _parameter(parameter: inspect.Parameter) -> str:
    default = parameter.default
    return parameter.name if default is inspect.Parameter.empty else f"{parameter.name}={default!r}"


def records() -> str:
    """Return the fields of a rule's inputs and results, with their comments."""
    blocks = []
    for kind in (ClipInputs, ClipBand, ClipResult):
        lines = [line for line in inspect.getsource(kind).splitlines() if re.match(r"    \w+: ", line)]
        blocks.append("\n".join([f"class {kind.__name__}:", *lines]))
    return "```python\n" + "\n\n\n".join(blocks) + "\n```"


def pages_of_rules() -> list[str]:
    """Return the names of the site's rule pages, one for each plugin folder that has a page."""
    return [folder.parent.name.removeprefix("rlzoo_").replace("_", "-") for folder in (ROOT / "plugins").glob("*/README.md")]


def trainers() -> str:
    """Return a table of the versions of other trainers that the rules were last tested with."""
    rows = ["| trainer | version | what was run |", "|---|---|---|"]
    tested = tomllib.loads((ROOT / "tests" / "downstream" / "tested.toml").read_text(encoding="utf-8"))
    return "\n".join([*rows, *(f"| {name} | {each['seen']} | {each['how']} |" for name, each in tested.items())])


def part(name: str) -> str:
    """Return the text of one generated part."""
    kind, _, argument = name.partition(" ")
    makers = {
        "parameters": parameters,
        "docstring": docstring,
        "watch": watch,
        "task": task,
        "arguments": arguments,
        "excerpt": excerpt,
        "race": races.race,
    }
    if kind in makers:
        return makers[kind](argument)
    plain = {
        "rules": rules,
        "command-line": command_line,
        "configuration": configuration,
        "structure": structure,
        "laws": laws,
        "gate": gate,
        "functions": functions,
        "records": records,
        "trainers": trainers,
        "advantages": lambda: parts(load_zoo().advantages, formulas.ADVANTAGES),
        "corrections": lambda: parts(load_zoo().corrections, formulas.CORRECTIONS),
    }
    return plain[name]() if name in plain else ", ".join(f"`{config}`" for config in config_names())


def main() -> int:
    """Update every page, or with --check report the pages that are out of date."""
    stale = []
    plugins = sorted((ROOT / "plugins").glob("*/README.md"))
    for page in [ROOT / "README.md", *plugins, *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        fresh = PART.sub(lambda match: f"{match[1]}{part(match['name'])}\n{match[3]}", text)
        if fresh != text:
            stale.append(str(page.relative_to(ROOT)))
            if "--check" not in sys.argv:
                page.write_text(fresh, encoding="utf-8")
    site = ROOT / "zensical.toml"
    text = site.read_text(encoding="utf-8")
    pages = "".join(f'      "rules/{name}.md",\n' for name in sorted(pages_of_rules()))
    fresh = NAVIGATION.sub(lambda match: f"{match[1]}{pages}{match[2]}", text)
    if fresh != text:
        stale.append("zensical.toml")
        if "--check" not in sys.argv:
            site.write_text(fresh, encoding="utf-8")
    for file, picture in {MAP: draw_map(), **races.pictures(MAP.parent)}.items():
        if not file.exists() or file.read_text(encoding="utf-8") != picture:
            stale.append(str(file.relative_to(ROOT)))
            if "--check" not in sys.argv:
                file.write_text(picture, encoding="utf-8")
    print("\n".join(stale) or "all generated parts are up to date")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
