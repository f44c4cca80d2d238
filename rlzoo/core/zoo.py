"""Loads plugins, skips broken ones, and looks up clip policies, estimators, corrections and tasks by name."""

from __future__ import annotations

import functools
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from inspect import isabstract
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args

import pluggy
from pydantic import BaseModel, ValidationError

from rlzoo.core import hookspecs
from rlzoo.core.advantages import NEEDS as ADVANTAGE_NEEDS
from rlzoo.core.advantages import AdvantageEstimator
from rlzoo.core.corrections import Correction
from rlzoo.core.discovery import RESTRICT, Plugin, allowed_names, installed_plugins, named_plugins
from rlzoo.core.errors import UserError, described, did_you_mean, explain, first_mistake, shown
from rlzoo.core.policy import ClipPolicy, Scope, contract_problem

logger = logging.getLogger("rlzoo")

PART_NAME = re.compile(r"[a-z][a-z0-9]*([-_@][a-z0-9]+)*")
NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
SCOPES = get_args(Scope)
MOST_LISTED = 24  # maximum number of names in an error message

Part = TypeVar("Part", ClipPolicy, AdvantageEstimator, Correction)


@dataclass(frozen=True, slots=True)
class Entry(Generic[Part]):
    """A class in the zoo and the plugin that it comes from."""

    kind: type[Part]
    plugin: Plugin

    @property
    def source(self) -> str:
        """Distribution and version, or a file path."""
        return self.plugin.source


class Shelf(Mapping[str, type[Part]], Generic[Part]):
    """Sorted mapping from names to classes of one kind. The error for an unknown name suggests the closest known name.

    Example:
        >>> from rlzoo import load_zoo
        >>> sorted(load_zoo().corrections)[0] in load_zoo().corrections
        True
    """

    def __init__(self, what: str, command: str, base: Any, problems: Callable[[Any], Iterable[str]]) -> None:
        self.what, self.command = what, command
        self._base, self._problems = base, problems
        self._candidates: dict[str, list[Entry[Part]]] = {}  # usable classes by name, in the order of loading
        self.entries: dict[str, Entry[Part]] = {}
        self.aliases: dict[str, tuple[str, Mapping[str, Any]]] = {}  # the name and the settings that each alias stands for
        self.missing: dict[str, str] = {}  # names of classes and plugins that are not loaded, and why

    def __getitem__(self, name: str) -> type[Part]:
        """Return the class named ``name``; raise UserError if there is none."""
        if name in self.entries:
            return self.entries[name].kind
        if name in self.missing:
            label = f"{self.what} {name!r} cannot be used: "
            raise UserError(label + self.missing[name].removeprefix(label))
        left_out = "".join(f"; not loaded: {problem}" for problem in self.problems)
        known = [*self.entries, *self.aliases]
        listed = f" (installed: {', '.join(known)})" if len(known) <= MOST_LISTED else f"; see `rlzoo {self.command} list`"
        file = f"{name.replace('-', '_')}.py"
        hint = (
            f"; if {file} defines it, add --plugin {file} (in Python: pass the class)"
            if NAME.fullmatch(name) and Path(file).is_file()
            else "; pass settings with --set, or for several rules in a config (per_clip)" * ("/" in name)
        )
        raise UserError(f"unknown {self.what} {name!r}{hint or did_you_mean(name, known) or listed}{left_out}")

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    @property
    def problems(self) -> list[str]:
        """The reasons why plugins and classes were not loaded, one line per problem."""
        return list(dict.fromkeys(self.missing.values()))

    def outside(self) -> dict[str, list[str]]:
        """Return the names that third-party plugins provide, grouped by source (distribution and version, or path)."""
        sources: dict[str, list[str]] = {}
        for name, entry in self.entries.items():
            if not entry.plugin.bundled:
                sources.setdefault(entry.source, []).append(name)
        return dict(sorted(sources.items()))

    def build(self, key: str, settings: object) -> Part:
        """Build the object that a setting specifies by a name, an alias, or a mapping with a name and settings.

        Args:
            key: the setting's key, for error messages, such as ``"correction"``.
            settings: ``"name"`` or ``{"name": "name", "setting": value}``.

        Raises:
            UserError: the name or a setting is unknown, or a value is invalid.
        """
        fields = {"name": settings} if isinstance(settings, str) else settings
        if not isinstance(fields, Mapping) or not isinstance(fields.get("name"), str):
            article = "an" if self.what[0] in "aeiou" else "a"
            raise UserError(
                f"{key}={shown(settings)}: expected the name of {article} {self.what}, or a mapping with a name and settings"
            )
        name, aliased = self.aliases.get(fields["name"], (fields["name"], {}))
        kind = self[name]
        try:
            return kind.model_validate({**aliased, **{field: value for field, value in fields.items() if field != "name"}})
        except ValidationError as error:
            raise UserError(explain(error, kind, f"{key}.")) from error

    def add(self, plugin: Plugin, kind: Any) -> None:
        """Add a class to the candidates for its name, or record why it cannot be used."""
        if problem := self.problem(kind):
            self.reject(plugin, getattr(kind, "name", None), problem)
        else:
            self._candidates.setdefault(kind.name, []).append(Entry(kind, plugin))

    def problem(self, kind: Any) -> str | None:
        """Describe the problem with the value that a hook returned, or return None."""
        if not (isinstance(kind, type) and issubclass(kind, self._base)) or isabstract(kind):
            return f"{kind!r} is not a concrete subclass of {self._base.__name__}"
        return next(iter(self._problems(kind)), None)

    def reject(self, plugin: Plugin, name: object, problem: str) -> None:
        """Record why a class is not loaded; raise UserError if the user named its plugin."""
        label, names = (f"{self.what} {name!r}", [name]) if isinstance(name, str) else (self.what, [])
        self.skip(plugin, f"{label} cannot be used: {problem} ({plugin})", *names)

    def skip(self, plugin: Plugin, problem: str, *names: str) -> None:
        """Record why a plugin, or its classes with these names, is not loaded; raise UserError if the user named the plugin."""
        if plugin.asked_for:
            raise UserError(problem)
        log_once(problem)
        self.missing |= dict.fromkeys([plugin.name, plugin.name.replace("_", "-"), *names], problem)

    def resolve(self) -> None:
        """Choose a class for each name. A name that several plugins claim is left out unless a bundled class has it."""
        for name, (first, *others) in sorted(self._candidates.items()):
            if others:
                rival = others[0].plugin
                reason = f"{first.source} has the same name; rename or uninstall one of them ({rival})"
                self.missing[name] = f"{self.what} {name!r} cannot be used: {reason}"
                if not rival.asked_for:  # if the user named the plugin, a shared name is an error only when it is used
                    self.skip(rival, self.missing[name])
            if not others or (first.plugin.bundled and not others[-1].plugin.asked_for):
                self.entries[name] = first
                aliases: Mapping[str, Mapping[str, Any]] = getattr(first.kind, "aliases", {})
                self.aliases |= {alias: (name, fields) for alias, fields in aliases.items() if alias not in self._candidates}

    def asked_for(self) -> list[Entry[Part]]:
        """Return the classes of the plugins that the user named; raise UserError if another plugin uses one of their names."""
        for name in (name for name, entries in self._candidates.items() if entries[-1].plugin.asked_for):
            self[name]
        return [entry for entry in self.entries.values() if entry.plugin.asked_for]


class Zoo(Shelf[ClipPolicy]):
    """All loaded classes. It maps names to clip policies and has the estimators, corrections and tasks as attributes.

    Example:
        >>> from rlzoo import load_zoo
        >>> sorted(load_zoo())[0] in load_zoo()
        True
    """

    def __init__(self) -> None:
        super().__init__("rule", "clips", ClipPolicy, _policy_problems)
        self.advantages: Shelf[AdvantageEstimator] = Shelf(
            "advantage estimator", "advantages", AdvantageEstimator, _estimator_problems
        )
        self.corrections: Shelf[Correction] = Shelf("correction", "corrections", Correction, _part_problems)
        self.tasks: dict[str, str] = {}  # ``module:Class`` by name
        for shelf in (self.advantages, self.corrections):
            shelf.missing = self.missing


def load_zoo(plugins: Sequence[str | Path] = ()) -> Zoo:
    """Load all installed plugins (entry-point group ``rlzoo``) and the plugins in the files and folders named in ``plugins``.

    An installed plugin that cannot be used is skipped with a warning, and looking up its names raises an error. The
    environment variable ``RLZOO_PLUGINS`` restricts which installed plugins are loaded. An entry in ``plugins`` replaces an
    installed plugin whose module has the same name.

    Raises:
        UserError: an entry of ``plugins`` cannot be used.
    """
    zoo, named = Zoo(), named_plugins(plugins)
    for plugin in _allowed(zoo, named) + named:  # bundled plugins come first, so that their names take precedence
        try:
            answers = _bundled_answers(plugin) if plugin.bundled else _answers(plugin)
        except UserError as error:
            zoo.skip(plugin, str(error))
            continue
        for shelf, hook in ((zoo, CLIPS), (zoo.advantages, ADVANTAGES), (zoo.corrections, CORRECTIONS)):
            for kind in answers.get(hook, ()):
                shelf.add(plugin, kind)
        for name, reference in answers.get(TASKS, {}).items():
            if zoo.tasks.setdefault(name, reference) != reference:
                zoo.skip(plugin, f"task {name!r} cannot be used: {zoo.tasks[name]} has the same name ({plugin})")
    for shelf in (zoo, zoo.advantages, zoo.corrections):
        shelf.resolve()
    for name, entry in list(zoo.entries.items()):
        if problem := _advantage_problem(zoo, entry.kind):
            del zoo.entries[name]
            zoo.reject(entry.plugin, name, problem)
    return zoo


def _allowed(zoo: Zoo, named: Sequence[Plugin]) -> list[Plugin]:
    """Return the installed plugins that `RESTRICT` allows and that no user-named plugin replaces."""
    installed, allowed = installed_plugins(), allowed_names()
    usable: list[Plugin] = []
    excluded: list[Plugin] = []
    for plugin in installed:
        is_allowed = allowed is None or plugin.bundled or bool(plugin.names & allowed)
        new = next((new for new in named if new.module == plugin.module and not plugin.bundled), None)
        if new is None:
            (usable if is_allowed else excluded).append(plugin)
        elif is_allowed:
            log_once(f"{plugin} is not loaded: {new} replaces it")
    names = ", ".join(f"{plugin.name} ({plugin.source})" for plugin in excluded)
    reason = f"{RESTRICT} excludes {names}; add the plugins that you trust to it"
    zoo.missing |= {name: reason for plugin in excluded for name in (plugin.name, plugin.name.replace("_", "-"))}
    for name in sorted((allowed or set()).difference(*(plugin.names for plugin in installed))):
        zoo.missing[name] = f"{RESTRICT} names {name!r}, which is not installed"
        log_once(zoo.missing[name])
    return usable


HOOKS = CLIPS, ADVANTAGES, CORRECTIONS, TASKS = "rlzoo_clip_policies", "rlzoo_advantages", "rlzoo_corrections", "rlzoo_tasks"


def _answers(plugin: Plugin) -> dict[str, Any]:
    """Import a plugin, call its hooks, and return their results by hook name.

    Raises:
        UserError: the plugin does not follow the interface.
    """
    try:
        with warnings.catch_warnings(), redirect_stdout(sys.stderr):  # stdout may be read as JSON
            warnings.filterwarnings("ignore", message="Field name .* shadows an attribute")  # `contract_problem` reports it
            module = plugin.load()
    except (Exception, SystemExit) as error:
        raise UserError(f"{plugin} cannot be imported: {described(error)}") from error
    if problem := hookspecs.api_problem(getattr(module, "RLZOO_API", "{}.{}".format(*hookspecs.API_VERSION))):
        raise UserError(f"{plugin} cannot be used: {problem}")
    manager = pluggy.PluginManager(hookspecs.PROJECT)  # one for each plugin, because an invalid plugin stays registered
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(module)
    except pluggy.PluginValidationError as error:
        raise UserError(f"{plugin} is not valid: {described(error)}") from error
    callers = manager.get_hookcallers(module) or []
    known = [caller for caller in callers if caller.has_spec()]
    unknown = [caller.name for caller in callers if not caller.has_spec()]  # misspelt, or from a later version of rlzoo
    if not known and unknown:
        hint = did_you_mean(unknown[0], HOOKS)
        raise UserError(f"{plugin} has no hook that this version of rlzoo knows, only {unknown[0]!r}{hint}")
    if not known:
        raise UserError(f"{plugin} has no hook: add '@hookimpl def rlzoo_clip_policies(): return [YourPolicy]'")
    for name in unknown:
        log_once(f"{plugin} has a hook {name!r}, which this version of rlzoo does not know; the rest of the plugin is loaded")
    answers: dict[str, Any] = {}
    for caller in known:
        try:
            answer: Any = next(iter(caller()), None)  # pluggy omits results that are None
            answers[caller.name] = dict(answer) if caller.name == TASKS else list(answer)
        except Exception as error:
            raise UserError(f"{plugin} raised an error in its hook {caller.name}: {described(error)}") from error
    return answers


# cached because every command and every configuration loads the zoo
_bundled_answers = functools.cache(_answers)


def policy_problem(policy: Any) -> str | None:
    """Describe why a plugin could not provide this policy class, or return None."""
    zoo = load_zoo()
    return zoo.problem(policy) or _advantage_problem(zoo, policy)


@functools.cache
def log_once(text: str, level: int = logging.WARNING) -> None:
    """Log a message unless this process has already done so."""
    logger.log(level, text)


def _unset(kind: type, *names: str) -> Iterator[str]:
    return (f"{kind.__qualname__} does not set {name!r}" for name in names if not isinstance(getattr(kind, name, None), str))


def _policy_problems(policy: type[ClipPolicy]) -> Iterator[str]:
    """Yield the problems with a clip policy."""
    if problem := contract_problem(policy):
        yield f"it {problem}"
    yield from _unset(policy, "name", "paper", "scope")
    if not NAME.fullmatch(policy.name):
        yield "its name must be lower-case words joined by hyphens"
    if policy.scope not in SCOPES:
        yield f"it has scope {policy.scope!r} (allowed: {', '.join(SCOPES)})"
    yield from _default_problems(policy)


def _estimator_problems(estimator: type[AdvantageEstimator]) -> Iterator[str]:
    """Yield the problems with an advantage estimator."""
    for need in sorted(set(estimator.needs) - set(ADVANTAGE_NEEDS)):
        yield f"it needs {need!r}, which is not an optional input (known: {', '.join(ADVANTAGE_NEEDS)})"
    if "values" in estimator.needs and estimator.targets is AdvantageEstimator.targets:
        yield "it needs 'values', but does not implement `targets`, which returns what the critic should learn"
    yield from _part_problems(estimator)


def _part_problems(kind: type[AdvantageEstimator] | type[Correction]) -> Iterator[str]:
    """Yield the problems with an estimator or a correction."""
    yield from _unset(kind, "name", "paper")
    if not PART_NAME.fullmatch(kind.name):
        yield "its name must be lower-case words joined by underscores or hyphens"
    yield from _default_problems(kind)


def _default_problems(kind: type[BaseModel]) -> Iterator[str]:
    try:
        fields = kind.model_fields.items()
        kind.model_validate(
            {name: field.get_default(call_default_factory=True) for name, field in fields if not field.is_required()}
        )
    except Exception as error:
        problem = first_mistake(error) if isinstance(error, ValidationError) else described(error)
        yield f"it cannot be constructed with its defaults: {problem}"


def _advantage_problem(zoo: Zoo, policy: type[ClipPolicy]) -> str | None:
    """Describe the problem with a policy's default estimator, or return None."""
    default = policy.model_fields["advantage"].get_default(call_default_factory=True)
    try:
        zoo.advantages.build("its default advantage", default)
    except UserError as error:
        return str(error).partition("; not loaded: ")[0]  # other skipped plugins are reported separately
    return None
