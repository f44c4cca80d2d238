"""Base classes for commands and command groups that explain a command-line mistake in a single line."""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from typer.core import TyperCommand, TyperGroup

from rlzoo.core.errors import UserError, did_you_mean
from rlzoo.core.settings import user_path
from rlzoo.models.machine import LAUNCHED

ALONE = ("calibrate", "compare", "eval", "fairness", "replay", "rescore", "sweep")  # commands that need only one process
ALIKE = 0.75  # similarity (cutoff of `difflib`) above which an unknown option counts as a misspelling
NAMED = {"advantage": "clip.advantage", "correction": "correction", "rule": "clip", "task": "task.name"}
"""Maps names that users may try as options to the settings that take a name."""


class Group(TyperGroup):
    """A group of commands that suggests a correction for an unknown command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options before the command's name; raises `UserError` for an unknown option."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if type(error).__name__ != "NoSuchOption":  # typer's copy of click has no public name for it
                raise
            raise UserError(f"no such option before the command's name: {vars(error)['option_name']}; see --help") from None

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return the command with this name; raises `UserError` if there is none."""
        if args[0] not in self.commands and not ctx.resilient_parsing:
            within = f"{_path(ctx)}: " if ctx.parent else ""
            raise UserError(f"{within}no command {args[0]}{did_you_mean(args[0], self.commands) or '; see --help'}")
        return super().resolve_command(ctx, args)


class Command(TyperCommand):
    """A command that responds to a mistake on its command line with a correction, or with the help text of an option."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; raises `UserError` if it needs one process and a launcher has started several."""
        size = os.environ.get("WORLD_SIZE", "1")
        if ctx.info_name in ALONE and size != "1":
            names = ", ".join(name for name in LAUNCHED if name in os.environ)
            raise UserError(f"{ctx.info_name} runs in one process, but the environment has WORLD_SIZE={size}; unset {names}")
        return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line; raises `UserError` if it cannot be parsed."""
        if not ctx.resilient_parsing:  # set during shell completion
            args = [_with_home(word) for word in args]
            self._check_values(ctx, args)
        given = list(args)
        ctx.allow_extra_args = True
        try:
            rest = super().parse_args(ctx, args)
        except Exception as error:
            if not hasattr(error, "format_message"):  # typer's copy of click has no public names for its errors
                raise
            raise UserError(f"{_path(ctx)}: {self._explain(error, given)}") from None
        if rest and not ctx.resilient_parsing:
            raise UserError(f"{_path(ctx)} {rest[0]}: {_option_for(rest, self._options(), given)}")
        return rest

    def _options(self) -> list[str]:
        return [name for parameter in self.params for name in parameter.opts if name.startswith("--")]

    def _check_values(self, ctx: Any, given: Sequence[str]) -> None:
        """Raise `UserError` if an option that takes a value is followed by another option."""
        options = self._options()
        takes_value = {name: each for each in self.params for name in each.opts if not getattr(each, "is_flag", True)}
        for word, following in pairwise(given):
            if word in takes_value and following in options:
                raise UserError(f"{_path(ctx)}: {word} needs a value: {_help(takes_value[word])}")

    def _explain(self, error: Any, given: Sequence[str]) -> str:
        kind = type(error).__name__
        if kind == "NoSuchOption":
            return f"no option {error.option_name}{_advice(error.option_name, given, self._options())}"
        if kind == "MissingParameter":
            return f"{_label(error.param)} is missing: {_help(error.param)}"
        if kind == "BadOptionUsage" and given[-1:] == [error.option_name]:
            parameter = next(each for each in self.params if error.option_name in each.opts)
            return f"{error.option_name} needs a value: {_help(parameter)}"
        what, colon, why = str(error.format_message()).partition(": ")
        return f"{_continued(what)}{colon}{_continued(why.removeprefix('Value error, '))}"


def _with_home(word: str) -> str:
    """Expand the ``~`` of a path, which shells leave in place in ``--output=~/x``."""
    option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    return f"{option}{equals}{user_path(value)}" if value.startswith("~") else word


def _path(ctx: Any) -> str:
    """Return the command's name with its groups, such as ``clips show``."""
    return f"{ctx.info_name}" if ctx.parent is None or ctx.parent.parent is None else f"{_path(ctx.parent)} {ctx.info_name}"


def _label(parameter: Any) -> str:
    """Return an option as it is typed, or an argument's name as the help prints it."""
    name = parameter.metavar or parameter.name.upper()
    return next((option for option in parameter.opts if option.startswith("--")), f"{name}")


def _help(parameter: Any) -> str:
    """Return the help text of an option or an argument as part of a sentence."""
    return _continued(str(parameter.help))


def _continued(sentence: str) -> str:
    """Return a sentence without its full stop and, unless it begins with a name, without its initial capital."""
    text = sentence.removesuffix(".")
    return text if any(map(str.isupper, text.partition(" ")[0][1:])) else f"{text[:1].lower()}{text[1:]}"


def _option_for(rest: Sequence[str], options: Sequence[str], given: Sequence[str]) -> str:
    """Return a hint about what to write instead of the first unexpected argument."""
    word = rest[0]
    if "--set" in options and "=" in word:
        return f"change a setting with --set {shlex.quote(word)}"
    if "--plugin" in options and word.endswith(".py"):
        return f"name a plugin with --plugin {shlex.quote(word)}"
    if "--config" in options and (word.endswith((".yaml", ".yml")) or _is_config(word)):
        return f"name a config with --config {shlex.quote(word)}"
    named = next((value for option, value in pairwise(given) if option == "--clip"), None)
    if named is not None and "--seeds" in options and _are_rules(word):
        return f"separate rules with commas: --clip {','.join([named, *(rule for rule in rest if _are_rules(rule))])}"
    if "--clip" in options:
        return f"name the rule with --clip {word}" if _are_rules(word) else "unexpected argument; name a rule with --clip NAME"
    return "unexpected argument; see --help"


def _is_config(word: str) -> bool:
    from rlzoo.config.composition import config_names

    return word in config_names()


def _are_rules(word: str) -> bool:
    from rlzoo.core.zoo import load_zoo

    zoo = load_zoo()
    return all(name in zoo for name in word.split(","))


def _advice(option: str, arguments: Sequence[str], options: Sequence[str]) -> str:
    """Return a hint for an unknown option: a similar option or setting; settings are imported only if no option is similar."""
    names = {name.lstrip("-"): name for name in options}
    if close := difflib.get_close_matches(option.lstrip("-"), names, n=1, cutoff=ALIKE):
        return f"; did you mean {names[close[0]]!r}?"
    if "--set" in options and (keys := _settings(option.lstrip("-").replace("-", "_"))):
        return f"; did you mean --set {shlex.quote(f'{keys[0]}={_value(option, arguments)}')}?"
    return "; see --help"


def _settings(name: str) -> list[str]:
    """Return the dotted keys of all settings with this name."""
    from rlzoo.config.run_config import RunConfig
    from rlzoo.core.errors import keys_called

    if name in NAMED:
        return [NAMED[name]]
    section = RunConfig.model_fields.get(name)
    inner = getattr(section.annotation, "model_fields", {}) if section else {}
    first = next(
        (f"{name}.{key}" for key in ("path", "name") if key in inner), None
    )  # the setting that selects the model or the task of a section
    return [first] if first else keys_called(name, RunConfig)


def _value(option: str, arguments: Sequence[str]) -> str:
    """Return the value that was passed with the option."""
    for place, word in enumerate(arguments):
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
        if word == option and place + 1 < len(arguments):
            return arguments[place + 1]
    return "VALUE"
