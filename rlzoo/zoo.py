"""The zoo: loads plugins one by one, leaves out what is broken, and looks policies up by name."""

from __future__ import annotations

import functools
import logging
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import isabstract
from pathlib import Path
from typing import Any, get_args

import pluggy
from pydantic import ValidationError

from rlzoo import hookspecs
from rlzoo.discovery import RESTRICT, Plugin, allowed_names, installed_plugins, named_plugins
from rlzoo.errors import UserError, did_you_mean, first_mistake
from rlzoo.policy import ClipPolicy, Scope, contract_problem, required_fields

logger = logging.getLogger("rlzoo")

NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
SCOPES = get_args(Scope)


@dataclass(frozen=True, slots=True)
class Entry:
    """One policy of the zoo and where it comes from.

    Example:
        ``zoo.entries[name].source`` is ``"my-plugin 0.3"``.
    """

    policy: type[ClipPolicy]
    plugin: Plugin

    @property
    def source(self) -> str:
        """Distribution and version, or the path of a file."""
        return self.plugin.source


class Zoo(Mapping[str, type[ClipPolicy]]):
    """Clip policies by name, sorted; a missing name is answered with what there is.

    Example:
        >>> from rlzoo import load_zoo
        >>> sorted(load_zoo())[0] in load_zoo()
        True
    """

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.problems: dict[str, set[str]] = {}  # why something was left out, and what policies it would have brought
        self.excluded: list[Plugin] = []  # installed plugins that the environment does not allow
        self._contested: set[str] = set()  # policy names that two plugins claim, neither of them bundled

    def outside(self) -> dict[str, list[str]]:
        """The policies that did not come with rlzoo, by the distribution and version, or the path, they come from."""
        sources: dict[str, list[str]] = {}
        for name, entry in self.entries.items():
            if not entry.plugin.bundled:
                sources.setdefault(entry.source, []).append(name)
        return dict(sorted(sources.items()))

    def __getitem__(self, name: str) -> type[ClipPolicy]:
        """The policy class called ``name``; raises UserError, a KeyError's kinder cousin, when there is none."""
        if name in self.entries:
            return self.entries[name].policy
        for problem, policies in self.problems.items():
            if name in policies:
                raise UserError(f"clip policy {name!r} cannot be used: {problem}")
        if any(name in (plugin.name, plugin.name.replace("_", "-")) for plugin in self.excluded):
            raise UserError(f"clip policy {name!r} cannot be used: {_excluded(self.excluded)}")
        left_out = "".join(f"; left out: {problem}" for problem in self.problems)
        left_out += f"; {_excluded(self.excluded)}" if self.excluded else ""
        installed = ", ".join(self.entries)
        hint = did_you_mean(name, self.entries)
        raise UserError(f"unknown clip policy {name!r} (installed: {installed}){hint}{left_out}")

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def add(self, plugin: Plugin, policy: Any) -> None:
        """Take a policy in, unless something is wrong with it or its name is taken."""
        if problem := policy_problem(policy):
            self.refuse(plugin, f"returned {problem}", str(getattr(policy, "name", "")))
            return
        taken = self.entries.get(policy.name)
        if taken is None and policy.name not in self._contested:
            self.entries[policy.name] = Entry(policy, plugin)
            return
        other = taken.source if taken else "another plugin"
        self.refuse(
            plugin, f"returned clip policy {policy.name!r}, which {other} has too: rename or uninstall one", policy.name
        )
        if taken and not taken.plugin.bundled:  # nobody knows which of the two was meant
            self._contested.add(policy.name)
            del self.entries[policy.name]

    def refuse(self, plugin: Plugin, reason: str, *policies: str) -> None:
        """Leave out a plugin, or a policy of it; one that the user named stops the run."""
        if plugin.asked_for:
            raise UserError(f"{plugin} {reason}")
        self.problems[f"{plugin} {reason}"] = {*policies, plugin.name, plugin.name.replace("_", "-")}


def load_zoo(plugins: Sequence[str | Path] = ()) -> Zoo:
    """Load every installed clip policy (entry-point group ``rlzoo``), and those of the files and folders in ``plugins``.

    An installed plugin that cannot be used is left out with a warning that names it; asking the zoo for its policy is an
    error. The environment variable ``RLZOO_PLUGINS`` restricts which installed plugins are loaded. One of ``plugins`` takes the
    place of an installed plugin whose module has the same name; the same file or a copy of it, named twice, is one plugin.

    Raises:
        UserError: one of ``plugins`` cannot be used.
    """
    named, installed, allowed = named_plugins(plugins), installed_plugins(), allowed_names()
    zoo = Zoo()
    usable: list[Plugin] = []
    for plugin in installed:
        is_allowed = allowed is None or plugin.bundled or bool(plugin.names & allowed)
        new = next((new for new in named if new.module == plugin.module and not plugin.bundled), None)
        if new is None:
            (usable if is_allowed else zoo.excluded).append(plugin)
        elif is_allowed:
            _warn_once(f"{plugin} is not loaded: {new} takes its place")
    for name in sorted((allowed or set()).difference(*(plugin.names for plugin in installed))):
        zoo.problems[f"{RESTRICT} names {name!r}, which is not installed"] = set()
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    for plugin in usable + named:  # bundled first, and those have the first claim on a name
        try:
            policies = _policies(plugin, manager)
        except _UnusableError as error:
            zoo.refuse(plugin, str(error))
        else:
            for policy in policies:
                zoo.add(plugin, policy)
    zoo.entries = dict(sorted(zoo.entries.items()))
    for problem in zoo.problems:
        _warn_once(problem)
    return zoo


class _UnusableError(Exception):
    """Why a plugin cannot be used."""


def _policies(plugin: Plugin, manager: pluggy.PluginManager) -> list[Any]:
    """Import a plugin and ask its hook.

    Raises:
        _UnusableError: the plugin does not keep to the interface.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Field name .* shadows an attribute")  # refused later, in one line
            module = plugin.load()
    except (Exception, SystemExit) as error:
        raise _UnusableError(f"cannot be imported: {_described(error)}") from error
    if problem := hookspecs.api_problem(getattr(module, "RLZOO_API", "{}.{}".format(*hookspecs.API_VERSION))):
        raise _UnusableError(f"cannot be used: {problem}")
    if manager.is_registered(module):  # another entry point of a distribution names the same module
        return []
    try:
        # pluggy ignores a second plugin of the same name without a word
        manager.register(module, name=f"{plugin.name} of {plugin.source}")
        manager.check_pending()
    except (ValueError, pluggy.PluginValidationError) as error:
        if manager.is_registered(module):
            manager.unregister(module)
        raise _UnusableError(f"is not valid: {_described(error)}") from error
    hooks = [hook for hook in manager.hook.rlzoo_clip_policies.get_hookimpls() if hook.plugin is module]
    if not hooks:
        raise _UnusableError("has no hook: add '@hookimpl def rlzoo_clip_policies(): return [YourPolicy]'")
    try:
        answer: Any = hooks[0].function()
        return list(answer) if isinstance(answer, Iterable) else [answer]
    except Exception as error:
        raise _UnusableError(f"raises in its hook rlzoo_clip_policies: {_described(error)}") from error


def find_policies(name: str) -> list[type[ClipPolicy]]:
    """The policy of that name; or every policy of a plugin file or folder, when ``name`` is the path of one.

    Raises:
        UserError: no such policy, or a plugin that cannot be used.
    """
    if not name.endswith(".py") and not Path(name).is_dir() and NAME.fullmatch(name):
        return [load_zoo()[name]]
    return [entry.policy for entry in load_zoo([name]).entries.values() if entry.plugin.asked_for]


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning(text)


def _excluded(plugins: Sequence[Plugin]) -> str:
    names = ", ".join(f"{plugin.name} ({plugin.source})" for plugin in plugins)
    return f"{RESTRICT} leaves out {names}; add what you trust to it"


def policy_problem(policy: Any) -> str | None:
    """What is wrong with what a hook returned, or None."""
    if not (isinstance(policy, type) and issubclass(policy, ClipPolicy)) or isabstract(policy):
        return f"{policy!r}, which is no ClipPolicy class with a __call__"
    unset = (
        f"does not set {name!r}" for name in ("name", "paper", "scope") if not isinstance(getattr(policy, name, None), str)
    )
    if problem := contract_problem(policy) or next(unset, None):
        return f"clip policy {policy.__qualname__}, which {problem}"
    if not NAME.fullmatch(policy.name):
        return f"clip policy {policy.name!r}, whose name is not made of lower-case words with hyphens"
    if policy.scope not in SCOPES:
        return f"clip policy {policy.name!r} with scope {policy.scope!r} (allowed: {', '.join(SCOPES)})"
    try:
        _ = required_fields(policy) or policy()
    except Exception as error:
        problem = first_mistake(error) if isinstance(error, ValidationError) else _described(error)
        return f"clip policy {policy.name!r}, which cannot be made with its defaults: {problem}"
    return None


def _described(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {error}".strip().partition("\n")[0]
