"""Escapes control characters in untrusted text."""

from __future__ import annotations


def printable(text: str, keep: str = "") -> str:
    r"""Escape control characters so that untrusted text cannot move the cursor, hide other text or reverse it.

    Example:
        >>> print(printable("a\x1b[2Jb"))
        a\x1b[2Jb
    """
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode("ascii") for char in text
    )
