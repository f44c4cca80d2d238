"""Finds plugins: in installed distributions, in files and in folders; nothing of them is run before it is asked for."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from rlzoo.errors import UserError, shown
from rlzoo.hookspecs import PROJECT
from rlzoo.reading import SETTINGS, opened, read_text

RESTRICT = "RLZOO_PLUGINS"
"""Environment variable: unset loads every installed plugin, empty only the bundled ones, else a comma list of plugins or
distributions to load beside them."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """A plugin that was found and not yet imported.

    Example:
        ``Plugin("third", "third-party 1.2", load=entry_point.load, bundled=False, asked_for=False)``
    """

    name: str
    source: str  # distribution and version, or a path
    load: Callable[[], Any]
    bundled: bool
    asked_for: bool  # named by the user for this run, so any problem with it is an error

    def __str__(self) -> str:
        return f"plugin {self.source!r}" if self.asked_for else f"plugin {self.name!r} of {self.source}"


@dataclass(frozen=True, slots=True)
class Found:
    """What there is to load, and what `RESTRICT` had to do with it.

    Example:
        ``find_plugins(["mine.py"]).plugins[-1].name`` is ``"mine"``.
    """

    plugins: list[Plugin]  # to load, the bundled ones first
    excluded: list[Plugin]  # installed, and not allowed
    missing: list[str]  # allowed, and not installed


def find_plugins(paths: Sequence[str | Path]) -> Found:
    """Every plugin to load; nothing of one that is excluded is imported.

    Args:
        paths: files and folders the user named.

    Raises:
        UserError: a path that holds no plugin.
    """
    installed = [*_installed()]
    allowed = os.environ.get(RESTRICT)
    excluded: list[Plugin] = []
    missing: list[str] = []
    if allowed is not None:
        wanted = {_normal(name) for name in allowed.split(",") if name.strip()}
        missing = sorted(wanted - {name for plugin in installed for name in _names(plugin)})
        excluded = [plugin for plugin in installed if not (plugin.bundled or wanted & _names(plugin))]
        installed = [plugin for plugin in installed if plugin not in excluded]
    return Found(installed + [plugin for path in paths for plugin in _from_path(Path(path))], excluded, missing)


def _installed() -> Iterator[Plugin]:
    named = functools.cache(_name_and_version)  # one distribution has most of them, and reading its metadata takes long
    described = []
    for point in metadata.entry_points(group=PROJECT):
        distribution, version = named(point.dist) if point.dist else ("unknown distribution", "")
        described.append((_normal(distribution) != PROJECT, point.name, f"{distribution} {version}".rstrip(), point))
    for outside, name, source, point in sorted(described, key=lambda item: item[:3]):
        yield Plugin(name, source, point.load, bundled=not outside, asked_for=False)


def _name_and_version(distribution: metadata.Distribution) -> tuple[str, str]:
    return distribution.name, distribution.version


def _names(plugin: Plugin) -> set[str]:
    return {_normal(plugin.name), _normal(plugin.source.partition(" ")[0])}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def absolute(path: str | Path) -> str:
    """The whole path of a plugin that the user named, so that it is found from elsewhere too.

    Raises:
        UserError: no file can have that name.
    """
    try:
        return str(Path(path).expanduser().resolve())
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"plugin {shown(str(path))} cannot be looked for: {error}") from error


def _from_path(path: Path) -> Iterator[Plugin]:
    try:
        path = path.expanduser()
        path.stat()
    except FileNotFoundError:
        pass  # said below
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"plugin {shown(str(path))} cannot be looked for: {error}") from error
    if path.is_dir():
        yield from _from_folder(path)
    elif path.is_file() and path.suffix == ".py":
        yield _file_plugin(path)
    else:
        kind = "is not a .py file" if path.exists() else "does not exist"
        raise UserError(f"plugin {str(path)!r} {kind}; give a .py file, a package, or the folder of a distribution")


def _from_folder(folder: Path) -> Iterator[Plugin]:
    """A distribution by its entry points, a package as one plugin, any other folder as one plugin per file."""
    project = folder / "pyproject.toml"
    if project.is_file():
        try:
            points = tomllib.loads(read_text(project, SETTINGS)).get("project", {}).get("entry-points", {})
        except (OSError, ValueError) as error:
            raise UserError(f"plugin {str(folder)!r}: its pyproject.toml cannot be read: {error}") from error
        if not points.get(PROJECT):
            raise UserError(f"plugin {str(folder)!r}: its pyproject.toml has no entry points in the group '{PROJECT}'")
        for module in points[PROJECT].values():
            yield Plugin(module, str(folder), _distribution_loader(folder, module), bundled=False, asked_for=True)
        return
    files = [folder] if (folder / "__init__.py").is_file() else sorted(folder.glob("*.py"))
    files = [file for file in files if not file.name.startswith(("_", "test_", "conftest"))]
    if not files:
        raise UserError(f"plugin {str(folder)!r} holds no .py file")
    yield from map(_file_plugin, files)


def _distribution_loader(folder: Path, module: str) -> Callable[[], ModuleType]:
    def load() -> ModuleType:
        for root in (folder, folder / "src"):
            if root.is_dir() and str(root.resolve()) not in sys.path:
                sys.path.insert(0, str(root.resolve()))
        return importlib.import_module(module)

    return load


def _file_plugin(path: Path) -> Plugin:
    file = path / "__init__.py" if path.is_dir() else path

    def load() -> ModuleType:
        with opened(file, SETTINGS):  # not a pipe, nor a gigabyte
            pass
        return _import_file(file.resolve(), file.stat().st_mtime_ns)

    return Plugin(path.stem, str(path), load, bundled=False, asked_for=True)


@functools.cache
def _import_file(file: Path, modified: int) -> ModuleType:
    """The module in a file; the same object as long as the file does not change, so that its classes stay the same."""
    name = f"rlzoo_plugin_{file.parent.name if file.stem == '__init__' else file.stem}_{abs(hash((file, modified))):x}"
    folders = [str(file.parent)] if file.stem == "__init__" else None
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
    assert spec, "a .py file has a spec"
    assert spec.loader, "and a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pydantic looks the annotations of its classes up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
