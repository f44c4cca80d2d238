"""Each of the four rules that FSPO is compared with."""

import pytest

from rlzoo import load_zoo

POLICIES = {name: load_zoo()[name]() for name in ("fspo", "gspo", "grpo", "rloo")}


@pytest.fixture(params=list(POLICIES))
def policy(request):
    return POLICIES[request.param]
