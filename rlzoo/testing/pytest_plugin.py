"""Runs the laws as pytest tests: in a test file, or for any policy named on the command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rlzoo.policy import ClipPolicy, with_defaults
from rlzoo.testing.laws import LAWS, Law

if TYPE_CHECKING:
    import pytest


def parametrize_with_checks(policies: Sequence[ClipPolicy]) -> Callable[..., None]:
    """Return a pytest test function with one case per policy and law, omitting the laws that a policy opts out of."""
    import pytest

    cases = [(policy, law) for policy in policies for law in LAWS if law.name not in policy.exempt]

    @pytest.mark.parametrize(("policy", "law"), cases, ids=[f"{policy.name}-{law.name}" for policy, law in cases])
    def test_policy_keeps_the_laws(policy: ClipPolicy, law: Law) -> None:
        law(policy)

    return test_policy_keeps_the_laws


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--clip NAME|FILE.py``."""
    parser.addoption(
        "--clip",
        action="append",
        default=[],
        metavar="NAME|FILE",
        help="check this clip policy against the laws; may be repeated",
    )


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add one test per law for each policy named by ``--clip``."""
    from rlzoo.zoo import find_policies

    named: list[str] = config.getoption("--clip")
    for policy in (policy for name in named for policy in find_policies(name)):
        for law in LAWS:
            items.append(_law_item(session, with_defaults(policy), law))


def _law_item(session: pytest.Session, policy: ClipPolicy, law: Law) -> pytest.Item:
    import pytest

    class LawItem(pytest.Item):
        def runtest(self) -> None:
            if law.name in policy.exempt:
                pytest.skip(f"opted out: {policy.exempt[law.name]}")
            law(policy)

        def reportinfo(self) -> tuple[str, None, str]:
            return policy.name, None, f"{policy.name} {law.name}"

    item: pytest.Item = LawItem.from_parent(session, name=f"{policy.name}::{law.name}")
    return item
