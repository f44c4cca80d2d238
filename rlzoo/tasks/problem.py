"""Defines the type of a question with its reference answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One question with its reference answer.

    Example:
        >>> Problem(question="3+5+9=", answer="17").answer
        '17'
    """

    question: str
    answer: str
