"""The fingerprint of a run, which holds the facts that determine its results and lets a resumed run report changes."""

from __future__ import annotations

import ast
import hashlib
import json
import logging
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlzoo.config.engines import engine_of
from rlzoo.config.redaction import redact_settings
from rlzoo.config.run_config import RunConfig
from rlzoo.core.discovery import DISTRIBUTION, installed_plugins
from rlzoo.core.errors import UserError
from rlzoo.core.plugin_files import OUTPUTS, copy_names, plugin_files
from rlzoo.core.settings import flatten
from rlzoo.journal.state import read_fingerprint
from rlzoo.support.parsing import parse_yaml
from rlzoo.support.reading import read_text
from rlzoo.tasks.task import fingerprint, seeded, train_fingerprint

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SCORE = "held-out score"  # see `RunConfig.held_out_score`
FREE = ("steps", "output", "launch.", "checkpoint.", "tracking.", SCORE)  # settings that may change when a run is resumed
PER_RANK = ("output", "tracking.")  # settings that matter on the main rank only
VERSION = "version of "  # a different version is reported but not refused
ZERO = "launch.deepspeed"
MODEL = "model "  # facts about the loaded model, which a dry run may lack
TRAIN_PROBLEMS = "training problems"

_REFERENCE = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_]\w*")  # names the user's code, as module:name
_BLOCK = 4096  # number of bytes that are summed together, a multiple of 8


def run_facts(config: RunConfig) -> dict[str, Any]:
    """Return the facts that determine a run's results, except those about its model.

    Settings have dotted keys. The other keys contain a space, and their values are hashes or versions.
    """
    settings = flatten(redact_settings(config.model_dump(mode="json", exclude={"plugins"})))
    held_out = config.task.held_out_problems(config.eval.num_problems) if config.eval.num_problems else []
    facts = {TRAIN_PROBLEMS: train_fingerprint(seeded(config.task, config.seed)), "evaluation problems": fingerprint(held_out)}
    facts |= {VERSION + name: metadata.version(name) for name in (DISTRIBUTION, "torch", "transformers")}
    return settings | facts | {SCORE: config.held_out_score} | file_facts(config)


def file_facts(config: RunConfig) -> dict[str, str]:
    """Return the hashes of the user's files that determine a run's results: code, data, and plugins."""
    facts: dict[str, str] = {}
    for file, name in user_files(config).items():  # files in different folders may have the same name
        with file.open("rb") as stream:
            facts[name] = facts.get(name, "") + hashlib.file_digest(stream, "sha256").hexdigest()
    return facts


def user_files(config: RunConfig) -> dict[Path, str]:
    """Return the user's files (code, data and plugins) that determine a run's results, with their names."""
    settings, names = flatten(redact_settings(config.model_dump(mode="json", exclude={"plugins"}))), dict[Path, str]()
    for name, file in _files(config, settings):
        names.setdefault(file.resolve(), name)
    return names


def model_facts(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, role: str = "") -> dict[str, str]:
    """Return the facts about a model as it was loaded, before training. ``role`` distinguishes the model from others."""
    configs = [config.to_diff_dict() for config in (model.config, model.generation_config) if config is not None]
    where_from = {"_name_or_path", "transformers_version", "_from_model_config"}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    facts = {
        "configuration": [{key: value for key, value in settings.items() if key not in where_from} for settings in configs],
        "tokenizer": [tokenizer.get_vocab() if backend is None else backend.to_str(), tokenizer.special_tokens_map],
        "chat template": tokenizer.chat_template,
    }
    texts = {key: json.dumps(value, sort_keys=True, default=str) for key, value in facts.items()}
    hashes = {f"{MODEL}{role}{key}": hashlib.sha256(text.encode()).hexdigest() for key, text in texts.items()}
    return hashes | {f"{MODEL}{role}weights": _hash_weights(model.state_dict())}


def _hash_weights(weights: Mapping[str, Tensor]) -> str:
    """Hash weights at memory speed by hashing only the sum of the 64-bit words in each block of `_BLOCK` bytes."""
    import torch

    hasher = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        data = weight.detach().reshape(-1).view(torch.uint8)
        data = data.clone() if data.storage_offset() % 8 else data  # 64-bit words must be aligned
        length = len(data) // _BLOCK * _BLOCK
        sums = data[:length].view(torch.int64).reshape(-1, _BLOCK // 8).sum(-1)
        hasher.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
        hasher.update(sums.cpu().numpy().tobytes() + data[length:].cpu().numpy().tobytes())
    return hasher.hexdigest()


def check_unchanged(config: RunConfig, facts: Mapping[str, Any], *, allow_changed: bool = False) -> list[tuple[int, str]]:
    """Compare a resumed run with the fingerprint in its directory, which is ``config.output``.

    Returns:
        One line for each difference, with its logging level: a warning for a difference that only ``allow_changed`` allows.

    Raises:
        UserError: something that determines the run's results has changed; the message names it.
    """
    assert config.output is not None, "a run is resumed in its directory"
    before, now = read_fingerprint(config.output), json.loads(json.dumps(facts))
    if not any(key.startswith(MODEL) for key in now):
        before = {key: value for key, value in before.items() if not key.startswith(MODEL)}
    fixed = {"steps": config.learner.schedule != "constant", "launch.": before.get(ZERO) or now.get(ZERO)}
    free = (*(key for key in FREE if not fixed.get(key)), VERSION)
    keys = [key for key in sorted(before | now) if before.get(key) != now.get(key)]
    others = tuple(f"{section}." for section in ("clip", "task") if f"{section}.name" in keys)  # of another rule or task
    keys = [key for key in keys if key in ("clip.name", "task.name") or not key.startswith(others)]
    changed = [_difference(key, before, now) for key in keys if not key.startswith(free)]
    # an adaptive rule's state is in its settings, and DeepSpeed's files can be read only by as many processes
    unreadable = tuple(key for key, holds in (("clip.", config.clip.is_adaptive), ("launch.", fixed["launch."])) if holds)
    is_fixed = any(key.startswith(unreadable) for key in keys)
    if changed and (is_fixed or not allow_changed):
        allow = "" if is_fixed else "pass --allow-changed to resume with the change, "
        raise UserError(f"--resume: {'; '.join(changed)}; undo this, {allow}or start a new run with another --output")
    lines = [(logging.INFO, _difference(key, before, now)) for key in keys if key.startswith(free)]
    return lines + [(logging.WARNING, line) for line in changed]


def resume_command(run: Path, facts: Mapping[str, Any]) -> str:
    """Return the command that resumes a run, with the settings whose values in ``facts`` differ from those in config.yaml."""
    started = flatten(parse_yaml(read_text(run / "config.yaml"))) | {"output": facts.get("output")}  # a run may have moved
    words = [f"{key}={json.dumps(value)}" for key, value in facts.items() if " " not in key and started.get(key) != value]
    return shlex.join(["rlzoo", "train", "--resume", "--output", str(run), *(part for one in words for part in ("--set", one))])


def refuse_different_ranks(ranks: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Raise UserError if anything differs between the ranks of a run, given their hosts and facts."""
    first_host, first = ranks[0]
    for rank, (host, facts) in enumerate(ranks):
        keys = [key for key in sorted({*first, *facts}) if first.get(key) != facts.get(key) and not key.startswith(PER_RANK)]
        names = [f"{key} ({facts[key]} and {first[key]})" if key.startswith(VERSION) else key for key in keys]
        if keys:
            raise UserError(
                f"rank {rank} (on {host}) and rank 0 (on {first_host}) have different values of {', '.join(names)}; make them "
                "equal, and start all ranks again"
            )


def _difference(key: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    if " " not in key or key.startswith(VERSION):
        return f"{key} changed from {before.get(key)!r} to {now.get(key)!r}"
    return f"{key} {'is new' if key not in before else 'is missing' if key not in now else 'has changed'} since the run started"


def _files(config: RunConfig, settings: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    """Yield the user's files (plugins, files in settings, and code) that determine a run's results, with their names."""
    code: list[Path] = []
    for path, name in copy_names(config.plugins).items():
        for place, file in plugin_files(path).items():
            if file.suffix not in OUTPUTS:
                yield f"plugin {name}/{place}" if path.is_dir() else f"plugin {name}", file
                code.append(file)
    recording = engine_of(config.rollout).recording
    yield from ((f"file {file}", file) for file in (recording.files if recording else ()))
    values = [value for key, value in settings.items() if not key.startswith(FREE)]
    texts = {text for value in values for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)}
    yield from ((f"file {text}", path) for text in sorted(texts) if _is_file(path := Path(os.path.expanduser(text))))  # noqa: PTH111
    choices = [config.clip, config.estimator, config.correction, config.task]
    modules = {match[1] for match in map(_REFERENCE.fullmatch, texts) if match} | {
        type(choice).__module__ for choice in choices
    }
    ours = {plugin.module for plugin in installed_plugins() if plugin.bundled} | {"rlzoo", "builtins", "__main__"}
    names = [module for module in sorted(modules & sys.modules.keys()) if module.partition(".")[0] not in ours]
    for start in [*code, *(Path(file) for file in (getattr(sys.modules[name], "__file__", None) for name in names) if file)]:
        for file in _used_by(start.resolve()):
            yield f"file {os.path.relpath(file, start.resolve().parent)}", file


def _used_by(start: Path) -> list[Path]:
    """Return a Python file, the user's modules that it imports directly or indirectly, and files named in their strings."""
    installed = ("site-packages", "dist-packages", f"python{sys.version_info.major}.{sys.version_info.minor}", "lib-dynload")
    folders = [Path.cwd(), *(path for path in map(Path, sys.path) if path.name not in installed)]
    root = next(folder for folder in start.parents if not (folder / "__init__.py").is_file())
    package = start.relative_to(root).parts[0]
    files = [start]
    for file in files:
        for name in _named_in(file):
            for folder in (file.parent, *folders, *([root] if name.partition("/")[0] == package else [])):
                place = f"{folder}/{name}"
                if _is_file(place) and (real := Path(place).resolve()) not in files and real.suffix not in OUTPUTS:
                    files.append(real)
    return files


def _named_in(file: Path) -> Iterator[str]:
    """Yield the strings in a Python file, and the files of the modules that it may import."""
    try:
        tree = ast.parse(file.read_bytes() if file.suffix == ".py" else b"")
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.Import | ast.ImportFrom):
            above = "../" * (getattr(node, "level", 0) - 1) + (getattr(node, "module", "") or "").replace(".", "/")
            for path in (Path(above, alias.name.replace(".", "/")) for alias in node.names):
                names = (path, *path.parents[:-1]) if path.parts[0] != "rlzoo" else ()
                yield from (f"{name}{end}" for name in names for end in (".py", "/__init__.py"))


def _is_file(path: str | Path) -> bool:
    try:
        return Path(path).is_file() and os.access(path, os.R_OK)
    except (OSError, ValueError):  # the path is too long or contains a zero byte
        return False
