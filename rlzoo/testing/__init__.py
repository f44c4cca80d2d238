"""The laws that every rule, estimator and correction must obey, as a public conformance kit.

Add one line to a plugin's tests::

    from rlzoo.testing import parametrize_with_checks

    test_my_policy = parametrize_with_checks([MyPolicy()])

A policy that breaks a law on purpose gives the law's name and the reason in the class attribute ``exempt``. To check a
policy without a test file, use ``rlzoo clips check my-policy`` (or ``FILE.py``).
"""

from __future__ import annotations

from rlzoo.testing.check import Outcome, check, parametrize_with_checks, shrink
from rlzoo.testing.data import clip_stats, evaluate, off_policy_inputs
from rlzoo.testing.laws import LAWS, Law
from rlzoo.testing.parts import ADVANTAGE_LAWS, CORRECTION_LAWS
from rlzoo.testing.portrait import Portrait, portrait

__all__ = [
    "ADVANTAGE_LAWS", "CORRECTION_LAWS", "LAWS", "Law", "Outcome", "Portrait", "check", "clip_stats", "evaluate",
    "off_policy_inputs", "parametrize_with_checks", "portrait", "shrink",
]  # fmt: skip
