"""Removes secrets from logs, files and output: passwords in URLs, tokens, and values with secret-like names."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from rlzoo.core.settings import flatten

REDACTED = "<redacted>"  # replaces a secret
SHORTEST = 6  # minimum length of a secret in the environment; shorter values may occur in ordinary words

_NAME = re.compile(
    r".*(?:password|passwd|passphrase).*"  # PGPASSWORD, password_of_the_judge
    r"|(?:.*[_.\-])?(?:token|pass|pwd|secrets?|api_?keys?|access_?key|secret_?key|private_?key|authorization|credentials?|sig|signature)"
    r"(?:_(?:value|id|\d+))?"
)
_IS_A_PATH = re.compile(r"PWD|.*CREDENTIALS?", re.IGNORECASE)
"""Environment variables with secret-like names whose values are paths."""

_OR_NUMBERS = ("token", "pass", "sig", "_id")
"""Suffixes of names whose numeric values are not secrets, such as token IDs and counts."""

# to take linear time, the patterns also consume text without a secret, so that no text is scanned twice
# a password may contain a slash or an @, and the user name alone may be a token; without an @, the group user is None
_USERINFO = re.compile(
    r"(?P<scheme>[A-Za-z0-9+.\-]://)(?:(?P<user>[^\s'\"/@:]*(?::(?P<password>[^\s'\"]*))?)@|[^\s'\"/@:]*:[^\s'\"]*)"
)
_PARAMETER = re.compile(
    r"(?P<before>(?<![\w.\-])(?:[\w.\-]*\.)?(?P<name>[A-Za-z_][\w\-]{0,99})(?:=|['\"]:\s?))"  # name=value, and 'name': value
    r"(?P<value>'[^']*'|\"[^\"]*\"|[^\s'\",;&)}\]\[{(]+)"
)
_HEADER = re.compile(r"\b(?P<kind>Bearer|Basic)\s+[A-Za-z0-9._~+/=\-]{6,}")
_SHAPES = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"hf_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|sk-[A-Za-z0-9_\-]{16,}"  # OpenAI, Anthropic
    r"|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{16,}|glpat-[A-Za-z0-9_\-]{16,}"  # GitHub, GitLab
    r")"
)


def redact(text: str) -> str:
    """Replace everything in a text that is or looks like a secret.

    Secrets are user names and passwords in URLs, values that follow names such as ``api_key=``, tokens in known formats, and
    the values of environment variables that have secret-like names or contain a URL with a password.

    Example:
        >>> redact("postgresql://me:hunter2@host/db refused api_key=abc")
        'postgresql://<redacted>@host/db refused api_key=<redacted>'
    """
    for secret in environment_secrets():
        text = text.replace(secret, REDACTED)
    text = _replace_userinfo(text, f"{REDACTED}@")
    text = _PARAMETER.sub(_without_value, text)
    text = _HEADER.sub(rf"\g<kind> {REDACTED}", text)
    return _SHAPES.sub(REDACTED, text)


def redact_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Redact nested settings: values whose keys have secret-like names, and secrets that `redact` finds in other values.

    Example:
        >>> redact_settings({"judge": {"api_key": "abc", "model": "small"}, "max_new_tokens": 64})
        {'judge': {'api_key': '<redacted>', 'model': 'small'}, 'max_new_tokens': 64}
    """
    return {key: _redacted(value, str(key)) for key, value in settings.items()}


def redacted_keys(settings: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys of the values that were redacted when the settings were written."""
    return [key for key, value in flatten(settings).items() if REDACTED in str(value)]


def with_secrets_of(settings: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``written`` settings, replacing redacted values with those in ``settings``."""
    return {key: settings[key] if key in settings and REDACTED in str(value) else value for key, value in written.items()}


def without_userinfo(uri: str) -> str:
    """Remove the user name, the password and any secret parameters from a URL."""
    return _PARAMETER.sub(_without_value, _replace_userinfo(uri, ""))


def environment_secrets() -> list[str]:
    """Return the secrets in environment variables, longest first: values under secret-like names, and passwords in URLs."""
    secrets: set[str] = set()
    for name, value in os.environ.items():
        if is_secret_name(name) and not _IS_A_PATH.fullmatch(name):
            secrets.add(value.strip())
        secrets |= {address["password"] or "" for address in _USERINFO.finditer(value)}
    secrets |= {unquote(value) for value in secrets}
    return sorted((value for value in secrets if len(value) >= SHORTEST and value != REDACTED), key=len, reverse=True)


def is_secret_name(name: str) -> bool:
    """Return whether a setting, parameter or environment variable has a secret-like name.

    Example:
        >>> [is_secret_name(name) for name in ("PGPASSWORD", "judge.apiKey", "max_tokens", "token_mean", "pass@k")]
        [True, True, False, False, False]
    """
    return _NAME.fullmatch(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()) is not None


def _replace_userinfo(text: str, replacement: str) -> str:
    return _USERINFO.sub(lambda url: url[0] if url["user"] is None else f"{url['scheme']}{replacement}", text)


def _without_value(parameter: re.Match[str]) -> str:
    is_number = parameter["value"].replace(".", "", 1).isdecimal() and parameter["name"].lower().endswith(_OR_NUMBERS)
    is_secret = is_secret_name(parameter["name"]) and not is_number
    return f"{parameter['before']}{REDACTED}" if is_secret else parameter[0]


class RedactingFilter(logging.Filter):
    """Redacts secrets in log records."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Redact the record's message and accept the record."""
        message = record.getMessage()
        cleaned = redact(message)
        if cleaned != message:
            record.msg, record.args = cleaned, ()
        if record.exc_info:  # a traceback contains the error's message
            record.exc_text = redact(logging.Formatter().formatException(record.exc_info))
        return True


def _redacted(value: Any, name: str) -> Any:
    """Redact a setting's value. Everything inside a setting with a secret-like name is redacted."""
    if isinstance(value, Mapping):
        return {key: _redacted(item, name if is_secret_name(name) else str(key)) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_redacted(item, name) for item in value]
    if isinstance(value, bool) or value in (None, ""):
        return value
    if is_secret_name(name) and (isinstance(value, str) or not name.lower().endswith(_OR_NUMBERS)):
        return REDACTED
    return redact(value) if isinstance(value, str) else value
