"""Explains a command-line mistake in a single line."""

from __future__ import annotations

import difflib
from typing import Any

from rlzoo.core.settings import user_path

ALIKE = 0.75  # similarity (cutoff of `difflib`) above which an unknown option counts as a misspelling
NAMED = {"advantage": "clip.advantage", "correction": "correction", "rule": "clip", "task": "task.name"}
"""Maps names that users may try as options to the settings that select a part by name."""


def explain_usage(error: Any) -> str:
    """Return one line with the command, the mistake and a suggestion, or "" if typer has printed the help instead."""
    command, message = error.ctx.command_path if error.ctx else "rlzoo", str(error.format_message()).removesuffix(".")
    options = [name for parameter in error.ctx.command.params for name in parameter.opts] if error.ctx else []
    advice = f"; see `{command} --help`"
    if type(error).__name__ == "NoSuchOption":
        message, advice = f"no option {error.option_name}", _similar(error.option_name, options) or advice
    elif "extra argument" in message and "--clip" in options:
        advice = "; name rules with --clip and settings with --set"
    elif message.endswith("?"):  # typer suggests a command
        advice = ""
    return message and f"{command.partition(' ')[2]}: {message[:1].lower()}{message[1:]}{advice}".removeprefix(": ")


def _similar(option: str, options: list[str]) -> str:
    """Return a similar option or setting as a suggestion. Settings are imported only if no option is similar."""
    if close := difflib.get_close_matches(option, options, n=1, cutoff=ALIKE):
        return f"; did you mean {close[0]!r}?"
    if "--set" not in options:
        return ""
    from rlzoo.config.run_config import RunConfig
    from rlzoo.core.errors import keys_called

    name = option.lstrip("-").replace("-", "_")
    keys = [NAMED[name]] if name in NAMED else keys_called(name, RunConfig)
    return f"; did you mean --set {keys[0]}=VALUE?" if keys else ""


def with_home(word: str) -> str:
    """Expand ``~`` at the start of a path, because shells do not expand it in ``--output=~/x``."""
    option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    return f"{option}{equals}{user_path(value)}" if value.startswith("~") else word
