"""A griffe extension that adapts this project's docstrings for the site's reference.

The comment or `Field` description of a field becomes its docstring. An ``Example:`` with a doctest becomes code, and a
paragraph that ends in ``::`` ends in one colon, as in Markdown.
"""

from __future__ import annotations

import ast
import html
import re
from typing import Any

import griffe

COMMENT = re.compile(r"\s{2}# (?P<text>.*)$")


class Docstrings(griffe.Extension):
    """Completes and reformats docstrings while griffe reads the sources."""

    def on_attribute_instance(
        self, *, node: ast.AST | griffe.ObjectNode, attr: griffe.Attribute, agent: griffe.Visitor | griffe.Inspector, **_: Any
    ) -> None:
        """Use the field's comment or description as its docstring, and show only its default."""
        if attr.docstring is not None or not isinstance(node, ast.AnnAssign) or not isinstance(agent, griffe.Visitor):
            return
        if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "Field":
            attr.value = _default(node.value)
        text = _description(node) or _comment(agent.code.splitlines()[node.end_lineno - 1] if node.end_lineno else "")
        if text:
            text = html.escape(text, quote=False)  # <clip> in a description is not a tag
            attr.docstring = griffe.Docstring(text, lineno=node.lineno, endlineno=node.end_lineno, parent=attr)

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename ``Example:`` to ``Examples:`` before a doctest, as griffe expects."""
        if obj.docstring is not None:
            text = re.sub(r"^Example:$(?=(?:\n.*)*?>>> )", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)


def _description(node: ast.AnnAssign) -> str | None:
    """Return the description of a pydantic field."""
    if not isinstance(node.value, ast.Call):
        return None
    given = (keyword.value for keyword in node.value.keywords if keyword.arg == "description")
    return next((value.value for value in given if isinstance(value, ast.Constant) and isinstance(value.value, str)), None)


def _default(field: ast.Call) -> str | None:
    """Return the default of a pydantic field, or None if it is required."""
    given = {keyword.arg: keyword.value for keyword in field.keywords}
    if "default_factory" in given:
        return f"{ast.unparse(given['default_factory'])}()"
    default = field.args[0] if field.args else given.get("default")
    return None if default is None or ast.unparse(default) in ("...", "Ellipsis") else ast.unparse(default)


def _comment(line: str) -> str | None:
    found = COMMENT.search(line)
    return found["text"] if found else None
