"""The short adapter on the how-to page has the loss of the long one in examples/."""

import re
from pathlib import Path

import pytest

from tests.published.shared import assert_agree, ours, shared_inputs
from tests.published.test_adapters import ZOO
from tests.published.test_verl_losses import theirs, without_rollout

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # transformers' own deprecations


def block_of_the_page(marker):
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "other-trainers.md").read_text()
    (block,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if marker in block)
    assert len(block.strip().splitlines()) <= 25
    names = {}
    exec(block, names)
    return names


@pytest.mark.parametrize("name", ["grpo", "fspo", "gspo", "cispo"])
def test_the_short_verl_loss_of_the_page_has_the_loss_of_the_long_one(name):
    names = block_of_the_page('register_policy_loss("zoo")')
    names["policy"] = policy = ZOO[name](reduction="sequence_mean")
    inputs = shared_inputs(policy)
    assert_agree(theirs("zoo", without_rollout(inputs), "sequence_mean", {}), ours(policy, inputs))
