"""The fingerprint of a run: what decides its numbers, so that a resumed run can name what has changed since the start."""

from __future__ import annotations

import ast
import hashlib
import json
import logging
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlzoo.config.run_config import RunConfig
from rlzoo.discovery import installed_plugins
from rlzoo.errors import UserError
from rlzoo.journal.state import read_fingerprint
from rlzoo.journal.tracking.record import flatten
from rlzoo.models.pretrained import eos_token_ids
from rlzoo.plugin_files import MOST, code_files, copy_names, is_output
from rlzoo.support.distribution import DISTRIBUTION
from rlzoo.support.redaction import redact_settings
from rlzoo.tasks.task import fingerprint, seeded

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FREE = ("steps", "output", "launch.", "checkpoint.", "tracking.")
"""Settings that a resumed run may change; ``steps`` only if the learning rate does not depend on it."""
TRAIN_PROBLEMS = "training problems"
VERSION = "version of "  # a different version is reported, not refused
MODEL = "model "  # facts about the loaded model, which a dry run does not load
MOST_NAMED = 5  # maximum number of differences in an error message

_REFERENCE = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_]\w*")  # names the user's code, as module:name
_BLOCK = 4096  # bytes of a weight that are summed, a multiple of 8


def run_facts(config: RunConfig) -> dict[str, Any]:
    """Return the facts that decide a run's numbers, except those about its model.

    Settings have dotted keys. The other keys contain a space, and their values are hashes or versions.
    """
    settings = flatten(redact_settings(config.model_dump(mode="json", exclude={"plugins"})))
    held_out = config.task.held_out_problems(config.eval.num_problems) if config.eval.num_problems else []
    facts = {TRAIN_PROBLEMS: seeded(config.task, config.seed).fingerprint(), "evaluation problems": fingerprint(held_out)}
    facts |= {VERSION + name: metadata.version(name) for name in (DISTRIBUTION, "torch", "transformers")}
    names: dict[Path, str] = {}
    for name, file in _files(config, settings):
        names.setdefault(file.resolve(), name)
    for file, name in names.items():
        facts[name] = facts.get(name, "") + _hash_file(file)  # files in different folders may have the same name
    return settings | facts


def model_facts(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the facts about a model as it was loaded, before it is trained."""
    configs = [config.to_diff_dict() for config in (model.config, model.generation_config) if config is not None]
    where_from = {"_name_or_path", "transformers_version", "_from_model_config"}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = tokenizer.get_vocab() if backend is None else backend.to_str()
    facts = {
        "configuration": [{key: value for key, value in each.items() if key not in where_from} for each in configs],
        "tokenizer": [type(tokenizer).__name__, vocabulary, tokenizer.special_tokens_map],
        "chat template": tokenizer.chat_template,
        "end tokens": sorted(eos_token_ids(model, tokenizer)),
    }
    texts = {key: json.dumps(value, sort_keys=True, default=str) for key, value in facts.items()}
    hashes = {MODEL + key: hashlib.sha256(text.encode()).hexdigest() for key, text in texts.items()}
    return hashes | {MODEL + "weights": _hash_weights(model.state_dict())}


def check_unchanged(config: RunConfig, facts: Mapping[str, Any], *, allow_changed: bool = False) -> list[tuple[int, str]]:
    """Compare a resumed run with the fingerprint in its directory, which is ``config.output``.

    Returns:
        One line for each difference, with its logging level: a warning for a difference that only ``allow_changed`` allows.

    Raises:
        UserError: something that decides the run's numbers has changed; the message names it.
    """
    assert config.output is not None, "a run is resumed in its directory"
    before, now = read_fingerprint(config.output), json.loads(json.dumps(facts))
    if not any(key.startswith(MODEL) for key in now):
        before = {key: value for key, value in before.items() if not key.startswith(MODEL)}
    free = (*(key for key in FREE if key != "steps" or config.learner.schedule == "constant"), VERSION)
    keys = [key for key in sorted(before | now) if before.get(key) != now.get(key)]
    others = tuple(f"{part}." for part in ("clip", "task") if f"{part}.name" in keys)  # settings of another rule or task
    keys = [key for key in keys if key in ("clip.name", "task.name") or not key.startswith(others)]
    changed = [_difference(key, before, now) for key in keys if not key.startswith(free)]
    is_fixed = config.clip.is_adaptive and any(key.startswith("clip.") for key in keys)
    if changed and (is_fixed or not allow_changed):
        more = f"; and {len(changed) - MOST_NAMED} more" if len(changed) > MOST_NAMED else ""
        allow = "" if is_fixed else "pass --allow-changed to resume with the change, "  # the rule's state is in its settings
        raise UserError(
            f"--resume: {'; '.join(changed[:MOST_NAMED])}{more}; undo this, {allow}or start a new run with another --output"
        )
    lines = [(logging.INFO, _difference(key, before, now)) for key in keys if key.startswith(free)]
    return lines + [(logging.WARNING, line) for line in changed]


def _difference(key: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    if " " not in key or key.startswith(VERSION):
        return f"{key} was {before.get(key)!r} and would be {now.get(key)!r}"
    return f"{key} {'is new' if key not in before else 'is missing' if key not in now else 'has changed'} since the run started"


def _files(config: RunConfig, settings: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    """Yield the user's files that decide a run's numbers, with their names: plugins, files in settings, and code."""
    code: list[tuple[Path, str]] = []
    for path, name in copy_names(config.plugins).items():
        for place, file in code_files(path).items():
            yield f"plugin {name}/{place}" if path.is_dir() else f"plugin {name}", file
            code.append((file, file.stem))
    values = [value for key, value in settings.items() if not key.startswith(FREE)]
    texts = {text for value in values for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)}
    for text in sorted(texts):
        if os.path.isfile(path := os.path.expanduser(text)):  # noqa: PTH111, PTH113 (pathlib raises errors)
            yield f"file {text}", Path(path)
    parts = [config.clip, config.estimator, config.correction, config.task]
    modules = {match[1] for match in map(_REFERENCE.fullmatch, texts) if match} | {type(part).__module__ for part in parts}
    ours = {plugin.module for plugin in installed_plugins() if plugin.bundled} | {"rlzoo", "__main__"}
    for module in sorted(modules):
        start = getattr(sys.modules.get(module), "__file__", None)
        if start is not None and module.partition(".")[0] not in ours:
            code.append((Path(start), module))
    for file, module in code:
        yield from _sources(file, module)


def _sources(start: Path, module: str) -> Iterator[tuple[str, Path]]:
    """Yield a Python file, the user's modules that it imports, directly or not, and the files that they name."""
    root = start.parents[module.count(".") + (start.name == "__init__.py")]
    folders = [root, *(path for path in map(Path, sys.path) if path != root and _is_users(path))]
    queue, seen = [start.resolve()], {start.resolve()}
    for file in queue:
        yield f"file {os.path.relpath(file, start.resolve().parent)}", file
        places = {place.resolve() for place in _named_in(file, folders) if os.path.isfile(place)}  # noqa: PTH113
        new = sorted(place for place in places - seen if not is_output(place))[: MOST - len(queue)]
        queue += new
        seen |= {*new}


def _named_in(file: Path, folders: list[Path]) -> Iterator[Path]:
    """Yield the paths of the modules that a Python file may import, and of the files that its strings may name."""
    try:
        tree = ast.parse(file.read_bytes() if file.suffix == ".py" else b"")
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (folder / node.value for folder in (file.parent, Path.cwd()))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            above, level = getattr(node, "module", None) or "", getattr(node, "level", 0)
            for parts in (f"{above}.{alias.name}".strip(".").split(".") for alias in node.names):
                for folder in [file.parents[level - 1]] if level else folders:
                    stems = [folder.joinpath(*parts[:length]) for length in range(1, len(parts) + 1) if parts[0] != "rlzoo"]
                    yield from (place for stem in stems for place in (stem.parent / f"{stem.name}.py", stem / "__init__.py"))


def _is_users(folder: Path) -> bool:
    """Return whether a folder of ``sys.path`` holds neither installed packages nor the standard library."""
    is_installed = {"site-packages", "dist-packages"} & {*folder.parts}
    return not is_installed and not folder.is_relative_to(sysconfig.get_path("stdlib"))


def _hash_file(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _hash_weights(weights: Mapping[str, Tensor]) -> str:
    """Hash weights at the speed of memory: of each block of `_BLOCK` bytes, only the sum of its 64-bit words is hashed."""
    import torch

    whole = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        data = weight.detach().reshape(-1).clone().view(torch.uint8)
        length = len(data) // _BLOCK * _BLOCK
        sums = data[:length].view(torch.int64).reshape(-1, _BLOCK // 8).sum(-1)
        whole.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
        whole.update(sums.cpu().numpy().tobytes() + data[length:].cpu().numpy().tobytes())
    return whole.hexdigest()
