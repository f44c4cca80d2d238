"""The zoo: loads plugins one by one, leaves out what is broken, and looks policies up by name."""

from __future__ import annotations

import functools
import logging
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import isabstract
from pathlib import Path
from typing import Any, get_args

import pluggy
from pydantic import ValidationError

from rlzoo import hookspecs
from rlzoo.discovery import RESTRICT, Plugin, find_plugins
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


@dataclass(frozen=True, slots=True)
class LoadProblem:
    """A plugin, or one policy of it, that was left out.

    Example:
        ``LoadProblem("plugin 'third' of third-party 1.2 cannot be imported: no module named 'x'", frozenset({"third"}))``
    """

    text: str
    policies: frozenset[str] = frozenset()  # names of policies that it would have brought, as far as is known


class Zoo(Mapping[str, type[ClipPolicy]]):
    """Clip policies by name, sorted; a missing name is answered with what there is.

    Example:
        >>> from rlzoo import load_zoo
        >>> sorted(load_zoo())[0] in load_zoo()
        True
    """

    def __init__(
        self, entries: Mapping[str, Entry], problems: Sequence[LoadProblem] = (), excluded: Sequence[Plugin] = ()
    ) -> None:
        self.entries = dict(sorted(entries.items()))
        self.problems = tuple(problems)
        self.excluded = tuple(excluded)  # installed plugins that the environment does not allow

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
        for problem in self.problems:
            if name in problem.policies:
                raise UserError(f"clip policy {name!r} cannot be used: {problem.text}")
        if any(name in (plugin.name, plugin.name.replace("_", "-")) for plugin in self.excluded):
            raise UserError(f"clip policy {name!r} cannot be used: {_excluded(self.excluded)}")
        left_out = "".join(f"; left out: {problem.text}" for problem in self.problems)
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


def load_zoo(plugins: Sequence[str | Path] = ()) -> Zoo:
    """Load every installed clip policy (entry-point group ``rlzoo``), and those of the files and folders in ``plugins``.

    An installed plugin that cannot be used is left out with a warning that names it; asking the zoo for its policy is an
    error. The environment variable ``RLZOO_PLUGINS`` restricts which installed plugins are loaded. One of ``plugins`` takes the
    place of the installed plugin of the same distribution; the same file or a copy of it, named twice, is one plugin.

    Raises:
        UserError: one of ``plugins`` cannot be used.
    """
    found = find_plugins(plugins)
    loading = _Loading()
    for installed, named in found.replaced:
        _warn_once(f"{installed} is not loaded: {named} takes its place")
    for name in found.missing:
        loading.problems.append(LoadProblem(f"{RESTRICT} names {name!r}, which is not installed"))
    for plugin in found.plugins:
        loading.register(plugin)
    loading.refuse_unknown_hooks()
    loading.collect()
    for problem in loading.problems:
        _warn_once(problem.text)
    return Zoo(loading.entries, loading.problems, found.excluded)


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


@dataclass
class _Loading:
    """The zoo while it is being loaded."""

    manager: pluggy.PluginManager = field(default_factory=lambda: pluggy.PluginManager(hookspecs.PROJECT))
    plugins: dict[str, Plugin] = field(default_factory=dict)  # by their name in pluggy
    entries: dict[str, Entry] = field(default_factory=dict)
    problems: list[LoadProblem] = field(default_factory=list)
    contested: set[str] = field(default_factory=set)  # policy names that two plugins claim, neither of them bundled

    def __post_init__(self) -> None:
        self.manager.add_hookspecs(hookspecs)

    def refuse(self, plugin: Plugin, reason: str, policies: Iterable[str] = ()) -> None:
        """Leave a plugin out; one that the user named stops the run."""
        if plugin.asked_for:
            raise UserError(f"{plugin} {reason}")
        self.problems.append(
            LoadProblem(f"{plugin} {reason}", frozenset(policies) | {plugin.name, plugin.name.replace("_", "-")})
        )

    def register(self, plugin: Plugin) -> None:
        """Import a plugin and hand it to pluggy."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Field name .* shadows an attribute")  # refused below, in one line
                module = plugin.load()
        except (Exception, SystemExit) as error:
            self.refuse(plugin, f"cannot be imported: {_told(error)}")
            return
        wrong_version = hookspecs.api_problem(getattr(module, "RLZOO_API", "{}.{}".format(*hookspecs.API_VERSION)))
        if wrong_version:
            self.refuse(plugin, f"cannot be used: {wrong_version}")
            return
        if self.manager.is_registered(module):  # another entry point of a distribution names the same module
            return
        key = f"{plugin.name} of {plugin.source}"  # pluggy ignores a second plugin of the same name without a word
        try:
            self.manager.register(module, name=key)
        except (ValueError, pluggy.PluginValidationError) as error:
            self.refuse(plugin, f"is not valid: {_told(error)}")
            return
        self.plugins[key] = plugin

    def refuse_unknown_hooks(self) -> None:
        """Leave out the plugins that implement a hook there is none of; pluggy names one at a time."""
        while True:
            try:
                self.manager.check_pending()
            except pluggy.PluginValidationError as error:
                name = self.manager.get_name(error.plugin) or ""
                self.manager.unregister(name=name)
                self.refuse(self.plugins.pop(name), f"is not valid: {error}")
            else:
                return

    def collect(self) -> None:
        """Ask every plugin for its policies."""
        answers = {hook.plugin_name: hook for hook in self.manager.hook.rlzoo_clip_policies.get_hookimpls()}
        for name, plugin in self.plugins.items():  # bundled first, and those have the first claim on a name
            if name not in answers:
                reason = "has no hook: add '@hookimpl def rlzoo_clip_policies(): return [YourPolicy]'"
                self.refuse(plugin, reason)
                continue
            try:
                policies: Any = answers[name].function()
                for policy in policies if isinstance(policies, Iterable) else [policies]:
                    self.add(plugin, policy)
            except UserError:
                raise
            except Exception as error:
                self.refuse(plugin, f"raises in its hook rlzoo_clip_policies: {_told(error)}")

    def add(self, plugin: Plugin, policy: Any) -> None:
        """Put a policy into the zoo, unless something is wrong with it or its name is taken."""
        problem = _policy_problem(policy)
        if problem:
            self.refuse(plugin, f"returned {problem}", {str(getattr(policy, "name", ""))})
            return
        taken = self.entries.get(policy.name)
        if taken is None and policy.name not in self.contested:
            self.entries[policy.name] = Entry(policy, plugin)
            return
        other = taken.source if taken else "another plugin"
        self.refuse(
            plugin, f"returned clip policy {policy.name!r}, which {other} has too: rename or uninstall one", {policy.name}
        )
        if taken and not taken.plugin.bundled:  # nobody knows which of the two was meant
            self.contested.add(policy.name)
            del self.entries[policy.name]


def _excluded(plugins: Sequence[Plugin]) -> str:
    names = ", ".join(f"{plugin.name} ({plugin.source})" for plugin in plugins)
    return f"{RESTRICT} leaves out {names}; add what you trust to it"


def _policy_problem(policy: Any) -> str | None:
    """What is wrong with what a hook returned, or None."""
    if not (isinstance(policy, type) and issubclass(policy, ClipPolicy)) or isabstract(policy):
        return f"{policy!r}, which is no ClipPolicy class with a __call__"
    if problem := contract_problem(policy):
        return f"clip policy {policy.__qualname__}, which {problem}"
    for attribute in ("name", "paper", "scope"):
        if not isinstance(getattr(policy, attribute, None), str):
            return f"clip policy {policy.__qualname__}, which does not set {attribute!r}"
    if not NAME.fullmatch(policy.name):
        return f"clip policy {policy.name!r}, whose name is not made of lower-case words with hyphens"
    if policy.scope not in SCOPES:
        return f"clip policy {policy.name!r} with scope {policy.scope!r} (allowed: {', '.join(SCOPES)})"
    problem = _problem_with_defaults(policy)
    return f"clip policy {policy.name!r}, which cannot be made with its defaults: {problem}" if problem else None


def _problem_with_defaults(policy: type[ClipPolicy]) -> str | None:
    """Why a policy cannot be made without settings, unless it asks for some."""
    try:
        _ = required_fields(policy) or policy()
    except ValidationError as error:
        return first_mistake(error)
    except Exception as error:
        return _told(error)
    return None


def _told(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {error}".strip().partition("\n")[0]
