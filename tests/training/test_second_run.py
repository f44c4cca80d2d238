"""Runs in one process do not affect each other."""

import os

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

import rlzoo.training.train  # importing it sets MLflow's environment variable
from rlzoo.config.sections import LaunchConfig, LearnerConfig
from rlzoo.core.errors import UserError
from rlzoo.models.processes import make_accelerator
from tests.training.short import quick, without_times


def process_state():
    """Return what a run could change for later ones; TORCHINDUCTOR_CACHE_DIR is set by torch, once in a process."""
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    return torch.get_default_dtype(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), environment


def trained(folder, autocast):
    overrides = [f"learner.autocast={autocast}", "tracking.mlflow=false", "eval.num_problems=0"]
    return without_times(rlzoo.train(quick(folder, steps=1, overrides=overrides)).metrics)


@pytest.mark.long
def test_a_second_run_in_one_process_may_have_another_autocast(tmp_path):
    before = process_state()
    first = trained(tmp_path / "first", "none")
    second = trained(tmp_path / "second", "bfloat16")
    assert trained(tmp_path / "third", "none") == first
    assert second != first
    assert process_state() == before


def test_an_accelerator_keeps_its_settings_when_another_is_made():
    first = make_accelerator(LaunchConfig(), LearnerConfig(autocast="bfloat16"))
    second = make_accelerator(LaunchConfig(), LearnerConfig())
    assert (first.mixed_precision, second.mixed_precision) == ("bf16", "no")
    product = torch.ones(2, 2)
    with first.autocast():
        assert (product @ product).dtype == torch.bfloat16
    with second.autocast():
        assert (product @ product).dtype == torch.float32


def test_a_run_without_deepspeed_after_one_with_it_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(AcceleratorState, "_shared_state", {"distributed_type": DistributedType.DEEPSPEED})
    with pytest.raises(UserError, match=r"launch.deepspeed=null: an earlier run in this process used DeepSpeed") as caught:
        make_accelerator(LaunchConfig(), LearnerConfig())
    assert "\n" not in str(caught.value)
