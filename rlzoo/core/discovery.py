"""Finds plugins in installed distributions, files and folders, without importing them."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from rlzoo.core.errors import UserError, shown
from rlzoo.core.hookspecs import PROJECT

DISTRIBUTION = "rlzoo-llm"
"""Name on PyPI, where `rlzoo` is a different project. Both install a package named `rlzoo`, so they cannot coexist."""

PUBLISHED = False
"""Whether the distribution is on PyPI. The first release sets this to True (`CONTRIBUTING.md`)."""

RESTRICT = "RLZOO_PLUGINS"
"""Environment variable that selects installed plugins. If it is unset, all plugins are loaded. If it is empty, only bundled
plugins are. Otherwise, it is a comma-separated list of plugins or distributions to load in addition to the bundled ones."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """A plugin that has been found but not yet imported."""

    name: str
    source: str  # distribution and version, or a path
    load: Callable[[], Any] = field(compare=False)
    bundled: bool
    asked_for: bool  # whether the user named the plugin for this run, in which case any problem with it is an error
    module: str  # a plugin that the user named replaces an installed plugin with the same module
    distribution: str = ""  # normalized name of the distribution that installed the plugin
    file: Path | None = None  # file of the plugin's module, if the user named the plugin

    @property
    def names(self) -> set[str]:
        """The names by which `RESTRICT` can select the plugin."""
        return {_normal(self.name), self.distribution}

    def __str__(self) -> str:
        return f"plugin {self.source!r}" if self.asked_for else f"plugin {self.name!r} from {self.source}"


def distinct(paths: Sequence[str | Path]) -> tuple[str, ...]:
    """Return the absolute paths of plugins, with links resolved and duplicates removed.

    Raises:
        UserError: a path is not a valid file name.
    """
    absolute: list[str] = []
    for path in paths:
        try:
            resolved = Path(path).expanduser().resolve()
            resolved.exists()  # raises an error if the name is too long
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(f"plugin {shown(str(path))} cannot be accessed: {error}") from error
        absolute.append(str(resolved))
    return tuple(dict.fromkeys(absolute))


def named_plugins(paths: Sequence[str | Path]) -> list[Plugin]:
    """Return the plugins in the files and folders that the user named. A file that is named repeatedly is included once.

    Raises:
        UserError: a path contains no plugin.
    """
    plugins: dict[Path | None, Plugin] = {}
    for plugin in (plugin for path in distinct(paths) for plugin in _from_path(Path(path))):
        plugins.setdefault(plugin.file, plugin)
    return list(plugins.values())


def allowed_names() -> set[str] | None:
    """Return the names of the plugins that `RESTRICT` allows in addition to the bundled ones, or None if it allows all."""
    allowed = os.environ.get(RESTRICT)
    return None if allowed is None else {_normal(name) for name in allowed.split(",") if name.strip()}


def installed_plugins() -> list[Plugin]:
    """Return the plugins of installed distributions, bundled plugins first. Both groups are sorted by name."""
    named = functools.cache(_name_and_version)  # most plugins come from one distribution, and reading its metadata is slow
    plugins = []
    for point in metadata.entry_points(group=PROJECT):
        name, version = named(point.dist)
        source, normal = f"{name} {version}".rstrip(), _normal(name)
        bundled, module = normal == DISTRIBUTION, point.value.partition(":")[0].strip()  # loading reports an invalid value
        plugins.append(Plugin(point.name, source, point.load, bundled, asked_for=False, module=module, distribution=normal))
    return sorted(plugins, key=lambda plugin: (not plugin.bundled, plugin.name, plugin.source))


def _name_and_version(distribution: metadata.Distribution | None) -> tuple[str, str]:
    with suppress(Exception):  # METADATA is missing if pip was interrupted
        if distribution:
            name, version = (distribution.metadata.get_all(key) or [""] for key in ("Name", "Version"))
            return name[0] or "unknown distribution", version[0]
    return "unknown distribution", ""


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def _from_path(path: Path) -> Iterator[Plugin]:
    """Yield the plugins at a path: a file, a package, or another folder of plugin files."""
    if (path / "pyproject.toml").is_file() and not (path / "__init__.py").is_file():
        raise UserError(
            f"plugin {str(path)!r} is the folder of a distribution; specify its .py file or package, or run pip install -e"
        )
    if (path / "__init__.py").is_file() or (path.is_file() and path.suffix == ".py"):
        yield _file_plugin(path)
    elif path.is_dir():
        files = [file for file in sorted(path.glob("*.py")) if not file.name.startswith(("_", "test_", "conftest"))]
        if not files:
            raise UserError(f"plugin {str(path)!r} contains no .py file")
        yield from map(_file_plugin, files)
    else:
        kind = "is not a .py file" if path.exists() else "does not exist"
        raise UserError(f"plugin {str(path)!r} {kind}; specify a .py file, a package, or a folder of .py files")


def _file_plugin(path: Path) -> Plugin:
    file = (path / "__init__.py" if path.is_dir() else path).resolve()

    def load() -> ModuleType:
        return _import_file(file, file.stat().st_mtime_ns)

    return Plugin(path.stem, str(path), load, bundled=False, asked_for=True, module=path.stem, file=file)


@functools.cache
def _import_file(file: Path, modified: int) -> ModuleType:
    """Import a file as a module. An unchanged file is not imported again, so its classes keep their identity."""
    name = f"rlzoo_plugin_{file.parent.name if file.stem == '__init__' else file.stem}_{abs(hash((file, modified))):x}"
    folders = [str(file.parent)] if file.stem == "__init__" else None
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
    assert spec, "a .py file has a spec"
    assert spec.loader, "a .py file's spec has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pydantic looks up the annotations of the module's classes in sys.modules
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
