"""The zoo: finds plugins, checks what they bring, and looks policies up by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from inspect import isabstract
from typing import Any

import pluggy

from rlzoo import hookspecs
from rlzoo.errors import UserError, did_you_mean
from rlzoo.policy import ClipPolicy


@dataclass(frozen=True, slots=True)
class Entry:
    """One policy of the zoo and where it comes from.

    Example:
        ``Entry(policy=MyPolicy, source="my-plugin 0.3")``
    """

    policy: type[ClipPolicy]
    source: str  # distribution and version


class Zoo(Mapping[str, type[ClipPolicy]]):
    """Clip policies by name, sorted; a missing name is answered with what there is.

    Example:
        >>> from rlzoo import load_zoo
        >>> sorted(load_zoo())[0] in load_zoo()
        True
    """

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self.entries = dict(sorted(entries.items()))

    def __getitem__(self, name: str) -> type[ClipPolicy]:
        """The policy class called ``name``; raises UserError, a KeyError's kinder cousin, when there is none."""
        if name not in self.entries:
            installed = ", ".join(self.entries)
            raise UserError(f"unknown clip policy {name!r} (installed: {installed}){did_you_mean(name, self.entries)}")
        return self.entries[name].policy

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.entries


def load_zoo() -> Zoo:
    """Discover every installed clip policy, through the entry-point group ``rlzoo``.

    Raises:
        UserError: a plugin that cannot be loaded, brings something that is no policy, or takes a name that is taken.
    """
    sources: dict[str, str] = {}  # plugin name in pluggy -> distribution and version
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    for entry_point in sorted(metadata.entry_points(group=hookspecs.PROJECT), key=lambda point: point.name):
        source = f"{entry_point.dist.name} {entry_point.dist.version}" if entry_point.dist else "unknown distribution"
        _register(manager, sources, entry_point.name, _import_entry_point(entry_point, source), source)
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise UserError(f"plugin {error.plugin!r}: {error}") from error
    return Zoo(_collect(manager, sources))


def _import_entry_point(entry_point: metadata.EntryPoint, source: str) -> Any:
    try:
        return entry_point.load()
    except Exception as error:
        raise UserError(f"plugin {entry_point.name!r} of {source} cannot be imported: {error}") from error


def _register(manager: pluggy.PluginManager, sources: dict[str, str], name: str, plugin: Any, source: str) -> None:
    # pluggy ignores a second entry point of the same name without a word, so names are kept here
    if name in sources:
        raise UserError(f"two plugins are called {name!r}: one of {sources[name]}, one of {source}; uninstall one")
    try:
        manager.register(plugin, name=name)
    except (ValueError, pluggy.PluginValidationError) as error:
        raise UserError(f"plugin {name!r} of {source} is not valid: {error}") from error
    sources[name] = source


def _collect(manager: pluggy.PluginManager, sources: Mapping[str, str]) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for implementation in manager.hook.rlzoo_clip_policies.get_hookimpls():
        source = sources[implementation.plugin_name]
        policies: Any = implementation.function()
        for policy in policies:
            if not (isinstance(policy, type) and issubclass(policy, ClipPolicy)) or isabstract(policy):
                raise UserError(
                    f"plugin {implementation.plugin_name!r} of {source} returned {policy!r}: not a ClipPolicy class"
                )
            for attribute in ("name", "paper", "scope"):
                if not isinstance(getattr(policy, attribute, None), str):
                    raise UserError(f"clip policy {policy.__qualname__} of {source} does not set {attribute!r}")
            if policy.name in entries:
                raise UserError(
                    f"clip policy {policy.name!r} is in {entries[policy.name].source} and in {source}; uninstall one"
                )
            entries[policy.name] = Entry(policy, source)
    return entries
