"""Checks that optional libraries are installed."""

from __future__ import annotations

import importlib.util

from rlzoo.core.errors import UserError


def require_extra(extra: str, *libraries: str) -> None:
    """Check that optional libraries are installed, without importing them.

    Raises:
        UserError: a library is missing; the message contains the command that installs the library.
    """
    for library in libraries:
        if importlib.util.find_spec(library) is None:
            raise UserError(f"{library} is not installed: pip install 'rlzoo-llm[{extra}]'")
