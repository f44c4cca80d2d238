"""Finds plugins: in installed distributions, in files and in folders; nothing of them is run before it is asked for."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import operator
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
from rlzoo.plugin_files import digest
from rlzoo.support.distribution import DISTRIBUTION
from rlzoo.support.reading import SETTINGS, read_text

RESTRICT = "RLZOO_PLUGINS"
"""Environment variable: unset loads every installed plugin, empty only the bundled ones, else a comma list of plugins or
distributions to load beside them."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """A plugin that was found and not yet imported."""

    name: str
    source: str  # distribution and version, or a path
    load: Callable[[], Any]
    bundled: bool
    asked_for: bool  # named by the user for this run, so any problem with it is an error
    module: str  # that holds it; a plugin that the user named takes the place of an installed one with this module
    distribution: str = ""  # that it was installed with, by its normal name
    file: Path | None = None  # of its module, where the user named it

    @property
    def names(self) -> set[str]:
        """What `RESTRICT` may call it."""
        return {_normal(self.name), self.distribution}

    @property
    def package(self) -> Path | None:
        """The folder of the plugin's package, found without importing it; None for a plugin of one file."""
        if self.file is not None:
            return self.file.parent if self.file.name == "__init__.py" else None
        if "." in self.module or self.asked_for:
            return None  # to look for a module in a package imports the package
        spec = importlib.util.find_spec(self.module)
        return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None

    def __str__(self) -> str:
        return f"plugin {self.source!r}" if self.asked_for else f"plugin {self.name!r} of {self.source}"


def distinct(paths: Sequence[str | Path]) -> tuple[str, ...]:
    """The whole paths of plugins, without those that hold nothing but what the ones before them hold.

    A plugin is the same under another spelling of its path, behind a link, and as a copy with the same content.

    Raises:
        UserError: a path that holds no plugin.
    """
    return tuple(str(path) for path, plugins in _without_repeats(paths) if plugins)


def named_plugins(paths: Sequence[str | Path]) -> list[Plugin]:
    """The plugins of files and folders that the user named, each once.

    Raises:
        UserError: a path that holds no plugin.
    """
    return [plugin for _, plugins in _without_repeats(paths) for plugin in plugins]


def allowed_names() -> set[str] | None:
    """The installed plugins and distributions that `RESTRICT` allows beside the bundled ones; None: all of them."""
    allowed = os.environ.get(RESTRICT)
    return None if allowed is None else {_normal(name) for name in allowed.split(",") if name.strip()}


def plugin_configs(paths: Sequence[str | Path] = ()) -> dict[str, Path]:
    """The configs of plugins that did not come with rlzoo: the files ``configs/FILE.yaml`` of their packages.

    Args:
        paths: plugins that the user named, beside the installed ones that `RESTRICT` allows.

    Returns:
        Their files by name, ``PLUGIN/FILE``.

    Raises:
        UserError: a path that holds no plugin.
    """
    allowed = allowed_names()
    installed = (plugin for plugin in installed_plugins() if not plugin.bundled and (allowed is None or plugin.names & allowed))
    found: dict[str, Path] = {}
    for plugin in [*installed, *named_plugins(paths)]:
        if package := plugin.package:
            found |= {f"{plugin.name}/{file.stem}": file for file in sorted((package / "configs").glob("*.yaml"))}
    return found


def _without_repeats(paths: Sequence[str | Path]) -> Iterator[tuple[Path, list[Plugin]]]:
    """Each path, resolved, with its plugins that none of the paths before it has."""
    seen: set[tuple[str, str]] = set()
    for path in map(_resolved, paths):
        new: dict[tuple[str, str], Plugin] = {}
        for plugin in _from_path(path):
            new.setdefault(_identity(plugin), plugin)
        yield path, [plugin for key, plugin in new.items() if key not in seen]
        seen |= new.keys()


def _identity(plugin: Plugin) -> tuple[str, str]:
    """What a plugin that the user named has in common with its copies: its name, and a digest of its code."""
    if plugin.file is None:
        return plugin.name, plugin.source
    whole = plugin.file.parent if plugin.file.name == "__init__.py" else plugin.file
    name = re.sub(r"-\d+$", "", whole.stem)  # a run directory numbers the copies of plugins with one name
    return name, digest(whole)


def installed_plugins() -> list[Plugin]:
    """The plugins of installed distributions: the bundled ones first, then by name."""
    named = functools.cache(
        operator.attrgetter("name", "version")
    )  # one distribution has most of them, and reading its metadata takes long
    plugins = []
    for point in metadata.entry_points(group=PROJECT):
        name, version = named(point.dist) if point.dist else ("unknown distribution", "")
        source, normal = f"{name} {version}".rstrip(), _normal(name)
        bundled = normal == DISTRIBUTION
        plugins.append(
            Plugin(point.name, source, point.load, bundled, asked_for=False, module=point.module, distribution=normal)
        )
    return sorted(plugins, key=lambda plugin: (not plugin.bundled, plugin.name, plugin.source))


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def _resolved(path: str | Path) -> Path:
    """The whole path of a plugin that the user named, so that it is found from elsewhere too.

    Raises:
        UserError: no file can have that name.
    """
    try:
        whole = Path(path).expanduser().resolve()
        whole.lstat()  # exists() does not raise from Python 3.14 on
    except (FileNotFoundError, NotADirectoryError):
        pass  # what looks for the plugin says so
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"plugin {shown(str(path))} cannot be looked for: {error}") from error
    return whole


def _from_path(path: Path) -> Iterator[Plugin]:
    """The plugins of a distribution by its entry points, of a package, of a file, or of each file of any other folder."""
    if (path / "pyproject.toml").is_file():
        modules = _entry_points(path)
        if not modules:
            raise UserError(f"plugin {str(path)!r}: its pyproject.toml has no entry points in the group '{PROJECT}'")
        for module in modules:
            load, file = _distribution_loader(path, module), _module_file(path, module)
            yield Plugin(module, str(path), load, bundled=False, asked_for=True, module=module, file=file)
    elif (path / "__init__.py").is_file() or (path.is_file() and path.suffix == ".py"):
        yield _file_plugin(path)
    elif path.is_dir():
        files = [file for file in sorted(path.glob("*.py")) if not file.name.startswith(("_", "test_", "conftest"))]
        if not files:
            raise UserError(f"plugin {str(path)!r} holds no .py file")
        yield from map(_file_plugin, files)
    else:
        kind = "is not a .py file" if path.exists() else "does not exist"
        raise UserError(f"plugin {str(path)!r} {kind}; give a .py file, a package, or the folder of a distribution")


def _entry_points(folder: Path) -> list[str]:
    """The modules of the entry points of a folder's distribution.

    Raises:
        UserError: its ``pyproject.toml`` cannot be read.
    """
    try:
        project = tomllib.loads(read_text(folder / "pyproject.toml", SETTINGS)).get("project", {})
        return [str(module) for module in project.get("entry-points", {}).get(PROJECT, {}).values()]
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"plugin {str(folder)!r}: its pyproject.toml cannot be read: {error}") from error


def _roots(folder: Path) -> list[Path]:
    """Where the modules of a distribution may be; the first counts."""
    return [root.resolve() for root in (folder / "src", folder) if root.is_dir()]


def _module_file(folder: Path, module: str) -> Path | None:
    """The file of a distribution's module; None if it is not in its folder."""
    places = [root.joinpath(*module.split(".")) for root in _roots(folder)]
    files = [file for place in places for file in (place / "__init__.py", place.with_name(f"{place.name}.py"))]
    return next((file.resolve() for file in files if file.is_file()), None)


def _distribution_loader(folder: Path, module: str) -> Callable[[], ModuleType]:
    def load() -> ModuleType:
        roots, top = _roots(folder), module.partition(".")[0]
        first = [str(root) for root in roots]
        sys.path[:] = first + [path for path in sys.path if path not in first]
        loaded = getattr(sys.modules.get(top), "__file__", None)
        is_ours = loaded is not None and any(Path(loaded).resolve().is_relative_to(root) for root in roots)
        if _module_file(folder, module) and not is_ours:
            for name in [name for name in sys.modules if name == top or name.startswith(f"{top}.")]:
                del sys.modules[name]  # an installed one, imported before this one was asked for
        importlib.invalidate_caches()
        return importlib.import_module(module)

    return load


def _file_plugin(path: Path) -> Plugin:
    file = (path / "__init__.py" if path.is_dir() else path).resolve()

    def load() -> ModuleType:
        return _import_file(file, file.stat().st_mtime_ns)

    return Plugin(path.stem, str(path), load, bundled=False, asked_for=True, module=path.stem, file=file)


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
