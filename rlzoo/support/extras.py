"""Checks that optional libraries are installed and returns the commands that install them."""

from __future__ import annotations

import importlib.util
import json
from importlib import metadata
from urllib.parse import urlsplit
from urllib.request import url2pathname

from rlzoo.core.discovery import DISTRIBUTION, PUBLISHED
from rlzoo.core.errors import UserError


def how_to_install(extra: str | None = None, options: str = "") -> str:
    """Return the command that reinstalls rlzoo from its original folder or, if there is none, from PyPI or a clone."""
    origin = json.loads(metadata.distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
    folder = url2pathname(urlsplit(origin["url"]).path) if "dir_info" in origin else None
    editable = "-e " if folder and origin["dir_info"].get("editable") else ""
    source = folder or (DISTRIBUTION if PUBLISHED else "PATH_OF_YOUR_CLONE")
    return f"pip install {options}{editable}'{source}{f'[{extra}]' if extra else ''}'"


def require_extra(extra: str, *libraries: str) -> None:
    """Check that optional libraries are installed, without importing them.

    Raises:
        UserError: a library is missing; the message contains the command that installs the library.
    """
    for library in libraries:
        if importlib.util.find_spec(library) is None:
            raise UserError(f"{library} is not installed: {how_to_install(extra)}")
