"""A Python-Markdown extension that writes formulas as MathML when the site is built, so that readers load no script.

Formulas are LaTeX, delimited as on GitHub: ``$...$`` within a line, and fences of the language ``math``. LaTeX that cannot be
converted ends the build. `zensical.toml` names this module and `display`.
"""

from __future__ import annotations

import re
from typing import Any

from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor
from math_core import LatexError, LatexToMathML
from pymdownx.superfences import SuperFencesException

INLINE = r"(?<![\\$\w])\$(?![\s$])([^$\n]*?[^\s$\\]|[^\s$\\])\$(?![\w$])([.,;:)]*)"
"""As on GitHub: no space just inside the dollar signs, and no letter or digit just outside. Punctuation stays on the line."""
CONVERTER = LatexToMathML()


class Mathematics(Extension):
    """Converts ``$...$``; code spans do not change, because their pattern has a higher priority."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        """Register the pattern before the one for backslashes."""
        md.inlinePatterns.register(_Inline(INLINE, md), "mathematics", 185)


class _Inline(InlineProcessor):
    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:  # type: ignore[override]  # noqa: N802
        text = f'<span class="formula-inline">{mathml(m[1])}{m[2]}</span>'
        return self.md.htmlStash.store(text), m.start(0), m.end(0)


def display(source: str, *_: Any, **__: Any) -> str:
    """Return a fence's formula on its own line, which scrolls if it is too wide; superfences defines the signature."""
    return f'<div class="formula">{mathml(source.strip(), display=True)}</div>'


def mathml(latex: str, *, display: bool = False) -> str:
    """Convert LaTeX to MathML.

    Raises:
        SuperFencesException: the LaTeX cannot be converted. After any other exception, a fence would silently remain code.
    """
    try:
        return CONVERTER.convert_with_local_state(latex, displaystyle=display)
    except LatexError as error:
        raise SuperFencesException(f"cannot convert the formula {latex!r}: {error}") from error


def makeExtension(**settings: Any) -> Mathematics:  # noqa: N802
    """Return the extension; Python-Markdown calls this function."""
    return Mathematics(**settings)
