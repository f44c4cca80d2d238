"""Finds plugins: in installed distributions, in files and in folders; nothing of them is run before it is asked for."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from rlzoo.errors import UserError, shown
from rlzoo.hookspecs import PROJECT
from rlzoo.plugin_files import digest
from rlzoo.support.reading import SETTINGS, opened, read_text

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
    distribution: str = ""  # that it belongs to, by its normal name; empty if that is not known
    module: str = ""  # of its entry point; empty for a distribution that was named as a whole
    file: Path | None = None  # of its module, where the user named it

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
    replaced: list[tuple[Plugin, Plugin]]  # installed, each with the one that was named in its place


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
    named: list[Plugin] = []
    for path in paths:
        named += _not_among(_from_path(Path(path)), named)
    replaced = [(old, new) for old in installed for new in named if _replaces(new, old)]
    gone = [old for old, _ in replaced]
    installed = [plugin for plugin in installed if plugin not in gone]
    excluded = [plugin for plugin in excluded if not any(_replaces(new, plugin) for new in named)]
    return Found(installed + named, excluded, missing, replaced)


def distinct(paths: Sequence[str | Path]) -> tuple[str, ...]:
    """The whole paths of plugins, without those that hold nothing but what the ones before them hold.

    A plugin is the same under another spelling of its path, behind a link, and as a copy with the same content.

    Raises:
        UserError: a path that holds no plugin.
    """
    kept: list[str] = []
    seen: list[Plugin] = []
    for path in map(absolute, paths):
        new = _not_among(_from_path(Path(path)), seen)
        seen += new
        kept += [path] if new else []
    return tuple(kept)


def _not_among(plugins: Iterable[Plugin], others: Sequence[Plugin]) -> list[Plugin]:
    new: list[Plugin] = []
    for plugin in plugins:
        if not any(_is_same(plugin, other) for other in [*others, *new]):
            new.append(plugin)
    return new


def _is_same(one: Plugin, other: Plugin) -> bool:
    """Whether two plugins that the user named are one: the same file, or a copy of it."""
    if one.file is None or other.file is None:
        return (one.name, one.source) == (other.name, other.source)
    if one.file == other.file:
        return True
    first, second = _whole(one.file), _whole(other.file)
    return _unnumbered(first) == _unnumbered(second) and digest(first) == digest(second)


def _whole(file: Path) -> Path:
    """A module's file, or the folder of a package."""
    return file.parent if file.name == "__init__.py" else file


def _unnumbered(path: Path) -> str:
    """The name of a plugin, also where a run directory has numbered its copy."""
    return re.sub(r"-\d+$", "", path.stem)


def _replaces(new: Plugin, installed: Plugin) -> bool:
    return bool(new.distribution) and new.distribution == installed.distribution and new.module in ("", installed.module)


def _installed() -> Iterator[Plugin]:
    named = functools.cache(_name_and_version)  # one distribution has most of them, and reading its metadata takes long
    described = []
    for point in metadata.entry_points(group=PROJECT):
        distribution, version = named(point.dist) if point.dist else ("unknown distribution", "")
        described.append((_normal(distribution) != PROJECT, point.name, f"{distribution} {version}".rstrip(), point))
    for outside, name, source, point in sorted(described, key=lambda item: item[:3]):
        distribution = _normal(source.partition(" ")[0])
        yield Plugin(
            name, source, point.load, bundled=not outside, asked_for=False, distribution=distribution, module=point.module
        )


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
    if (folder / "pyproject.toml").is_file():
        distribution, points = _project(folder)
        if not points:
            raise UserError(f"plugin {str(folder)!r}: its pyproject.toml has no entry points in the group '{PROJECT}'")
        for module in points:
            yield Plugin(
                module,
                str(folder),
                _distribution_loader(folder, module),
                bundled=False,
                asked_for=True,
                distribution=distribution,
                file=_module_file(folder, module),
            )
        return
    files = [folder] if (folder / "__init__.py").is_file() else sorted(folder.glob("*.py"))
    files = [file for file in files if not file.name.startswith(("_", "test_", "conftest"))]
    if not files:
        raise UserError(f"plugin {str(folder)!r} holds no .py file")
    yield from map(_file_plugin, files)


def _project(folder: Path) -> tuple[str, list[str]]:
    """The normal name of a folder's distribution, empty if it has none, and the modules of its entry points.

    Raises:
        UserError: its ``pyproject.toml`` cannot be read.
    """
    try:
        project = tomllib.loads(read_text(folder / "pyproject.toml", SETTINGS)).get("project", {})
        name, points = project.get("name", ""), project.get("entry-points", {}).get(PROJECT, {})
        return _normal(str(name)), [str(module) for module in points.values()]
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"plugin {str(folder)!r}: its pyproject.toml cannot be read: {error}") from error


def _roots(folder: Path) -> list[Path]:
    """Where the modules of a distribution may be."""
    return [root.resolve() for root in (folder, folder / "src") if root.is_dir()]


def _module_file(folder: Path, module: str) -> Path | None:
    """The file of a distribution's module; None if it is not in its folder."""
    places = [root.joinpath(*module.split(".")) for root in reversed(_roots(folder))]
    files = [file for place in places for file in (place / "__init__.py", place.with_name(f"{place.name}.py"))]
    return next((file.resolve() for file in files if file.is_file()), None)


def _distribution_loader(folder: Path, module: str) -> Callable[[], ModuleType]:
    def load() -> ModuleType:
        roots = _roots(folder)
        for root in map(str, roots):
            if root in sys.path:
                sys.path.remove(root)
            sys.path.insert(0, root)
        top = module.partition(".")[0]
        if _module_file(folder, module) and not _lies_in(sys.modules.get(top), roots):
            for name in [name for name in sys.modules if name == top or name.startswith(f"{top}.")]:
                del sys.modules[name]  # an installed one, imported before this one was asked for
        importlib.invalidate_caches()
        return importlib.import_module(module)

    return load


def _lies_in(module: ModuleType | None, roots: Sequence[Path]) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and any(Path(file).resolve().is_relative_to(root) for root in roots)


def _file_plugin(path: Path) -> Plugin:
    file = (path / "__init__.py" if path.is_dir() else path).resolve()

    def load() -> ModuleType:
        with opened(file, SETTINGS):  # not a pipe, nor a gigabyte
            pass
        return _import_file(file, file.stat().st_mtime_ns)

    distribution, module = _belongs_to(file)
    return Plugin(
        path.stem, str(path), load, bundled=False, asked_for=True, distribution=distribution, module=module, file=file
    )


def _belongs_to(file: Path) -> tuple[str, str]:
    """The distribution in whose working copy a module is, and the module as an entry point of it; else two empty texts."""
    folder = next((parent for parent in file.parents if (parent / "pyproject.toml").is_file()), None)
    if folder is None:
        return "", ""
    try:
        distribution, modules = _project(folder)
    except UserError:
        return "", ""  # nothing was asked of that project
    return next(((distribution, module) for module in modules if _module_file(folder, module) == file), ("", ""))


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
