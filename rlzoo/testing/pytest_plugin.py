"""Runs the laws as pytest tests in a test file."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlzoo.policy import ClipPolicy
from rlzoo.testing.laws import LAWS, Law


def parametrize_with_checks(policies: Sequence[ClipPolicy]) -> Callable[..., None]:
    """Return a pytest test function with one case per policy and law, omitting the laws that a policy opts out of."""
    import pytest

    cases = [(policy, law) for policy in policies for law in LAWS if law.name not in policy.exempt]

    @pytest.mark.parametrize(("policy", "law"), cases, ids=[f"{policy.name}-{law.name}" for policy, law in cases])
    def test_policy_keeps_the_laws(policy: ClipPolicy, law: Law) -> None:
        law(policy)

    return test_policy_keeps_the_laws
