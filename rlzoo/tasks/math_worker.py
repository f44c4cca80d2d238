"""The side of math grading that runs in a worker process: math-verify without its own time-outs, and without torch."""

from __future__ import annotations

import re

_IN_A_BASE = re.compile(r"-?[0-9]+\s*_\s*(?:\{\s*)?([0-9]+)\s*\}?")  # 52_8, 52_{8}

_FIRST = ("[1, 2)", r"so it is $[\frac{1}{2}, \sqrt{3})$", False)  # what is compiled at its first use is then compiled


def start() -> None:
    """Compare one answer ahead of the first, so that no answer's time pays for imports and tables; bound the memory."""
    import logging

    from rlzoo.tasks.limits import limit_memory

    limit_memory()
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that its SIGALRM time-outs are off
    score(*_FIRST)


def score(reference: str, answer: str, found: bool, reference_found: bool = True) -> float:
    r"""1.0 where the answer equals the reference as mathematics, else 0.0.

    Args:
        reference: the right answer, LaTeX or plain.
        answer: the response's answer if ``found``, else the whole response, for math-verify to find one in.
        found: whether ``answer`` has been extracted already.
        reference_found: the same of ``reference``, where that is another response.
    """
    from math_verify import parse, verify

    if len({base_of(text) for text in (reference, answer)} - {None}) > 1:  # math-verify drops the base
        return 0.0
    gold = parse(_boxed(reference) if reference_found else reference, parsing_timeout=0)  # 0: SIGALRM works in a main
    given = parse(_boxed(answer) if found else answer, parsing_timeout=0)  # thread only, and the parent watches the time
    return float(verify(gold, given, timeout_seconds=0))


def base_of(answer: str) -> str | None:
    """The base that a number is said to be written in.

    Example:
        >>> base_of("52_{8}"), base_of("52")
        ('8', None)
    """
    match = _IN_A_BASE.fullmatch(answer)
    return match[1] if match else None


def _boxed(answer: str) -> str:
    return f"\\boxed{{{answer}}}"
