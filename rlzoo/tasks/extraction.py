"""Finds the final answer in a response."""

from __future__ import annotations

import re

_TAG, _END_TAG = "<answer>", "</answer>"
_BOX_OR_BRACE = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)  # \\. skips \{ and \}
_ANSWER_IS = "answer is"


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{}`` with balanced braces, or None.

    Example:
        >>> last_boxed(r"\boxed{3} no, \boxed{\frac{1}{2}}")
        '\\frac{1}{2}'
    """
    # the start of each open box's content, or -1 for a plain brace; a single pass takes time linear in the length of the text
    open_braces: list[int] = []
    begin, content = -1, None
    for match in _BOX_OR_BRACE.finditer(text):
        token = match.group()
        if token == "{":
            open_braces.append(-1)
        elif token.endswith("{") and token != r"\{":
            open_braces.append(match.end())
        elif token == "}" and open_braces:
            opened = open_braces.pop()
            if opened > begin:
                begin, content = opened, text[opened : match.start()].strip()
    return content


def after_hashes(text: str) -> str | None:
    """Return the rest of the line after the last ``####``, which marks GSM8K's answers, or None."""
    return _line_after(text, "####")


def final_answer(response: str) -> str:
    r"""Return the final answer from a response to a puzzle.

    The final answer is the content of the last ``<answer>`` tag, else the content of the last ``\boxed{}``, else the rest of
    the line after the last ``####`` or "answer is", else the last non-empty line.
    """
    opened = response.rfind(_TAG, 0, max(response.rfind(_END_TAG), 0))  # the last opening tag that has a closing tag
    if opened >= 0:
        return response[opened + len(_TAG) :].partition(_END_TAG)[0].strip()
    boxed = last_boxed(response)
    if boxed is not None:
        return boxed
    if response.rfind("####") > response.rfind(_ANSWER_IS):
        return after_hashes(response) or ""
    sentence = _line_after(response, _ANSWER_IS)
    if sentence is not None:
        return sentence.lstrip(": ").removesuffix(".")
    lines = response.strip().splitlines()
    return lines[-1].strip() if lines else ""


def _line_after(text: str, marker: str) -> str | None:
    _, last_marker, rest = text.rpartition(marker)
    return rest.partition("\n")[0].strip() if last_marker else None
