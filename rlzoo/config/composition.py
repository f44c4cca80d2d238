"""Reads shipped configs, config files and overrides, and merges these layers into one configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from rlzoo.core.errors import UserError, did_you_mean, shown
from rlzoo.core.policy import ClipPolicy
from rlzoo.core.settings import user_path
from rlzoo.core.zoo import Zoo
from rlzoo.support.parsing import DEEPEST, UnreadableError, parse_yaml
from rlzoo.support.reading import read_text


def config_folders() -> list[Path]:
    """Return the folders that contain the shipped configs, in an installed wheel or in a checkout."""
    package = Path(str(resources.files("rlzoo")))
    return [folder for folder in (package / "configs", package.parent / "configs") if folder.is_dir()]


def config_names() -> list[str]:
    """Return the names of the shipped configs. A name includes the subfolder, as in ``paper/qwen3-1.7b``."""
    files = [(folder, file) for folder in config_folders() for file in folder.rglob("*.yaml")]
    return sorted({file.relative_to(folder).as_posix().removesuffix(".yaml") for folder, file in files})


def refuse_config(name: str) -> None:
    """Raise `UserError` if a name belongs to a shipped config."""
    if name in config_names():
        raise UserError(f"{name!r} is a config, not a rule: use --config {name}")


def build_rule(zoo: Zoo, settings: Mapping[str, Any]) -> ClipPolicy:
    """Build a rule from its ``clip`` settings, which include its name; raise `UserError` if a name or a setting is invalid."""
    if settings["name"] not in zoo:
        refuse_config(settings["name"])
    return zoo.build("clip", settings)


def read_config(config: str | Path) -> dict[str, Any]:
    """Read a shipped config by name, or any config file by path."""
    try:
        shipped = [folder / f"{config}.yaml" for folder in config_folders()]
        path = next((path for path in shipped if path.is_file()), user_path(config))
        text = read_text(path)
    except (OSError, ValueError) as error:  # the file is missing or not text, or the name is not a valid file name
        names = config_names()
        hint = did_you_mean(str(config), names) or f" (a file, or one of: {', '.join(names)})"
        raise UserError(f"no config {shown(str(config))}{hint}") from error
    try:
        content = parse_yaml(text)
    except UnreadableError as error:
        raise UserError(f"config {str(path)!r} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"config {str(path)!r} must contain keys and values such as 'steps: 40', not {type(content).__name__}")
    if odd := [key for key in content if not isinstance(key, str)]:
        raise UserError(f"config {str(path)!r}: {shown(odd[0])} is not a valid key; keys must be strings, such as 'steps'")
    return content


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Parse ``"section.key=value"`` strings with YAML values into nested settings. Later strings override earlier ones."""
    parsed: dict[str, Any] = {}
    for override in [overrides] if isinstance(overrides, str) else overrides:
        key, equals, text = override.partition("=")
        if not equals or not all(key.split(".")) or not key.isprintable():
            raise UserError(f"--set {shown(override)}: expected KEY=VALUE, such as learner.lr=1e-5")
        if key.count(".") > DEEPEST:
            raise UserError(f"--set {shown(override)}: the key has more than {DEEPEST} dots")
        try:  # a template such as {question}= is text, although YAML would read a mapping
            value: Any = text if re.match(r"\{\w+\}", text) else parse_yaml(text)
        except UnreadableError as error:
            raise UserError(f"--set {shown(override)}: {shown(text)} is not a YAML value: {error}") from error
        for name in reversed(key.split(".")):
            value = {name: value}
        parsed = merge(parsed, value, is_one_layer=True)
    return parsed


def named_settings(key: str, value: object) -> dict[str, Any]:
    """Return the settings of a layer's rule or task as a dict. A name becomes ``{"name": ...}``, and None becomes ``{}``."""
    settings = {"name": value} if isinstance(value, str) else value
    if not isinstance(settings, Mapping | None) or not isinstance((settings or {}).get("name", ""), str):
        raise UserError(
            f"{key}={shown(value)}: expected the name of a {'rule' if key == 'clip' else 'task'}, "
            "or settings that include a name"
        )
    return dict(settings or {})


def clip_name(layer: Mapping[str, Any]) -> str | None:
    """Return the name of the rule that a layer sets, or None."""
    return named_settings("clip", layer.get("clip")).get("name")


def listed(plugins: object) -> Sequence[str]:
    """Return the plugins that a layer lists."""
    if not isinstance(plugins, list | tuple | None):
        raise UserError(f"plugins={shown(plugins)}: expected a list of files and folders")
    return plugins or ()


def for_clip(layer: Mapping[str, Any], name: str | None) -> dict[str, Any]:
    """Apply a layer's ``per_clip`` settings for one rule and drop its settings for other rules."""
    settings = {key: value for key, value in layer.items() if key != "per_clip"}
    if isinstance(settings.get("clip"), str):
        settings["clip"] = {"name": settings["clip"]}
    if (clip_name(settings) or name) != name:
        del settings["clip"]
    per_clip = layer.get("per_clip") or {}
    changed = per_clip.get(name) or {} if isinstance(per_clip, dict) else None
    if not isinstance(changed, dict):
        raise UserError(f"per_clip must map the names of rules to settings, not {shown(per_clip)}")
    return merge(settings, changed)


NAMED = ("advantage", "clip", "correction", "task")
"""Keys whose value is either a name or a mapping that contains a name."""


def merge(below: Mapping[str, Any], above: Mapping[str, Any], *, is_one_layer: bool = False) -> dict[str, Any]:
    """Merge two layers. Sections are merged key by key, and any other value in ``above`` replaces the one in ``below``.

    If ``above`` sets a different name, such as another task, the settings in ``below`` are dropped unless ``is_one_layer``.
    """
    merged = dict(below)
    for key, value in above.items():
        old, new = merged.get(key), value
        if key in NAMED and isinstance(old, str) and isinstance(new, dict):
            old = {"name": old}
        elif key in NAMED and isinstance(old, dict) and isinstance(new, str):
            new = {"name": new}
        if isinstance(old, dict) and isinstance(new, dict):
            # one task's settings do not apply to another task
            replaces = key in NAMED and not is_one_layer and "name" in old and new.get("name", old["name"]) != old["name"]
            merged[key] = dict(new) if replaces else merge(old, new, is_one_layer=is_one_layer)
        elif is_one_layer and key in merged and isinstance(new, dict):
            raise UserError(f"{key}={shown(old)} contradicts another --set of a setting in {key}; use only one of the two")
        else:
            merged[key] = value
    return merged
