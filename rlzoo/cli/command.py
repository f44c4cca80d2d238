"""The class of all commands, which suggests a setting or another option when an option does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand

from rlzoo.errors import UserError

ALIKE = 0.75  # cutoff of `difflib`, above which an option counts as misspelt
NAMED = {"advantage": "clip.advantage", "correction": "correction", "rule": "clip", "task": "task.name"}
"""Maps names that users may try as options to the settings that take a name."""


class Command(TyperCommand):
    """A command that suggests a correction for an unknown option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line; raises `UserError` for an unknown option."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if type(error).__name__ != "NoSuchOption":  # typer's copy of click has no public name for it
                raise
            option = str(vars(error)["option_name"])
            options = [name for parameter in self.params for name in parameter.opts if name.startswith("--")]
            raise UserError(f"{ctx.info_name}: no option {option}{_advice(option, given, options)}") from None


def _advice(option: str, arguments: Sequence[str], options: Sequence[str]) -> str:
    """Return what to write instead: a similar option or a setting; settings are imported only if no option is similar."""
    names = {name.lstrip("-"): name for name in options}
    if close := difflib.get_close_matches(option.lstrip("-"), names, n=1, cutoff=ALIKE):
        return f"; did you mean {names[close[0]]!r}?"
    if "--set" in options and (keys := _settings(option.lstrip("-").replace("-", "_"))):
        return f"; did you mean --set {keys[0]}={_value(option, arguments)}?"
    return "; see --help"


def _settings(name: str) -> list[str]:
    """Return the keys of settings with this name."""
    from rlzoo.config.run_config import RunConfig
    from rlzoo.errors import keys_called

    if name in NAMED:
        return [NAMED[name]]
    section = RunConfig.model_fields.get(name)
    inner = getattr(section.annotation, "model_fields", {}) if section else {}
    first = next(
        (f"{name}.{key}" for key in ("path", "name") if key in inner), None
    )  # the setting that selects a section's model or task
    return [first] if first else keys_called(name, RunConfig)


def _value(option: str, arguments: Sequence[str]) -> str:
    """Return the value that was given to the option."""
    for place, word in enumerate(arguments):
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
        if word == option and place + 1 < len(arguments):
            return arguments[place + 1]
    return "VALUE"
