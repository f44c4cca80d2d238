"""The two short adapters on the how-to page have the loss of the long ones in examples/."""

import re
from pathlib import Path

import pytest
import torch

from tests.published.shared import assert_agree, ours, shared_inputs
from tests.published.test_adapters import ZOO, trainer_of
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
def test_the_short_trl_trainer_of_the_page_has_the_loss_of_the_long_one(name, tmp_path):
    short_class = block_of_the_page("class ZooTrainer")["ZooTrainer"]
    settings = {"gradient_accumulation_steps": 1, "steps_per_generation": 2}
    long = trainer_of(tmp_path, ZOO[name](), **settings)
    batch = next(iter(long.get_train_dataloader()))
    inputs = long._prepare_inputs(batch)
    inputs["old_per_token_logps"] = long._get_per_token_logps_and_entropies(
        long.model,
        torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
        torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
        inputs["completion_ids"].shape[1],
    )[0].detach() + 0.05 * torch.randn(inputs["completion_ids"].shape, generator=torch.Generator().manual_seed(0))
    expected = long._compute_loss(long.model, inputs)
    short_class.policy = ZOO[name]()
    got = short_class._compute_loss(long_as(short_class, long), long.model, inputs)
    assert got.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-7)


def long_as(kind, trainer):
    """The prepared trainer, seen as another class of trainer."""
    seen = object.__new__(kind)
    seen.__dict__.update(trainer.__dict__)
    del seen.__dict__["policy"]
    return seen


@pytest.mark.parametrize("name", ["grpo", "fspo", "gspo", "cispo"])
def test_the_short_verl_loss_of_the_page_has_the_loss_of_the_long_one(name):
    names = block_of_the_page('register_policy_loss("zoo")')
    names["policy"] = policy = ZOO[name](reduction="sequence_mean")
    inputs = shared_inputs(policy)
    assert_agree(theirs("zoo", without_rollout(inputs), "sequence_mean", {}), ours(policy, inputs))
