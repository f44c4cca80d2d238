"""The side of math grading that runs in a worker process: math-verify without its own time-outs, and without torch."""

from __future__ import annotations


def start() -> None:
    """Import math-verify ahead of the first answer, so that no answer's time pays for it."""
    import logging

    import math_verify

    assert math_verify
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that its SIGALRM time-outs are off


def score(reference: str, answer: str, found: bool) -> float:
    r"""1.0 where the answer equals the reference as mathematics, else 0.0.

    Args:
        reference: the right answer, LaTeX or plain.
        answer: the response's answer if ``found``, else the whole response, for math-verify to find one in.
        found: whether ``answer`` has been extracted already.
    """
    from math_verify import parse, verify

    gold = parse(_boxed(reference), parsing_timeout=0)  # 0: SIGALRM works in a main thread only, and pebble watches the time
    given = parse(_boxed(answer) if found else answer, parsing_timeout=0)
    return float(verify(gold, given, timeout_seconds=0))


def _boxed(answer: str) -> str:
    return f"\\boxed{{{answer}}}"
