"""FSDP2 in two processes gives the same weights as one; a checkpoint resumes exactly, in any number of processes."""

import json
import logging
import shutil
import sys

import pytest
import torch
from rlzoo_fspo import FSPO
from safetensors.torch import load_file

from rlzoo import UserError
from rlzoo.cli.main import main
from rlzoo.config.sections import LaunchConfig, LearnerConfig
from rlzoo.gate.launch import check_launch
from rlzoo.models.processes import leave_process_group, make_accelerator
from tests.off_policy import make_model, off_policy_batch
from tests.processes.fsdp_worker import make_learner, updates, weights_of
from tests.processes.test_processes import ROOT, ranks

pytestmark = pytest.mark.long

ALONE = LaunchConfig(fsdp=True)


@pytest.fixture(scope="module")
def two(zygote, tmp_path_factory):
    """The folder in which two processes wrote checkpoints and weights."""
    folder = tmp_path_factory.mktemp("fsdp")
    ranks(zygote, folder, folder=folder, script=ROOT / "tests" / "processes" / "fsdp_worker.py", kind="fsdp")
    return folder


@pytest.fixture(autouse=True)
def no_process_group_remains():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def stage(folder, name):
    return load_file(folder / f"{name}.safetensors")


def flat(weights):
    return torch.cat([weights[name].flatten().float() for name in sorted(weights)])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 1e-2)], ids=["float32", "bfloat16"])
def test_two_processes_take_the_steps_of_one_with_float32_masters(two, dtype, tolerance):
    name = str(dtype).removeprefix("torch.")
    learner = make_learner(dtype, LaunchConfig())
    norms = updates(learner, off_policy_batch(make_model(), FSPO()), 3)
    expected, got, start = weights_of(learner), stage(two, f"{name}-3"), make_model().to(dtype).state_dict()
    assert {key: tensor.dtype for key, tensor in got.items()} == {key: tensor.dtype for key, tensor in expected.items()}
    moved = flat(expected) - flat({key: start[key] for key in expected})
    error = float((flat(got) - flat(expected)).norm() / moved.norm())
    assert error < tolerance
    results = json.loads((two / "results.json").read_text())[name]
    assert results["norms"] == pytest.approx(norms, rel=tolerance)
    assert max(norms) > 0.5  # the norm limit took effect
    assert results["held"] == pytest.approx(0.5, abs=0.05)  # process 0 holds half of the weights


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_continues_bit_for_bit(two, dtype):
    for step in (3, 5):
        uninterrupted, resumed = stage(two, f"{dtype}-{step}"), stage(two, f"{dtype}-resumed-{step}")
        assert all(torch.equal(uninterrupted[name], resumed[name]) for name in uninterrupted)
    assert any(not tensor.equal(stage(two, f"{dtype}-3")[name]) for name, tensor in uninterrupted.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_shards_of_two_processes_are_loaded_by_one(two, dtype):
    name = str(dtype).removeprefix("torch.")
    learner = make_learner(dtype, ALONE)
    learner.load(two / name, 3, 3)
    ours, theirs = weights_of(learner), stage(two, f"{name}-3")
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    updates(learner, off_policy_batch(make_model(), FSPO()), 2)
    moved = flat(stage(two, f"{name}-5")) - flat(theirs)
    assert float((flat(weights_of(learner)) - flat(theirs) - moved).norm() / moved.norm()) < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_one_process_takes_the_steps_of_the_plain_path_bit_for_bit(dtype):
    ends = []
    for launch in (LaunchConfig(), ALONE):
        learner = make_learner(dtype, launch, max_tokens_per_micro_batch=60)
        norms = updates(learner, off_policy_batch(make_model(), FSPO()), 3)
        ends.append((norms, weights_of(learner)))
    (norms, plain), (sharded_norms, sharded) = ends
    assert norms == sharded_norms
    assert all(torch.equal(plain[name], sharded[name]) for name in plain)


def refused(folder, launch=ALONE):
    learner = make_learner(torch.float32, launch)
    before = weights_of(learner)
    with pytest.raises(UserError) as caught:
        learner.load(folder, 3, 3)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(learner).items())
    return str(caught.value)


def test_a_state_of_another_kind_of_launch_is_refused(two, tmp_path):
    shutil.copytree(two / "float32", tmp_path / "state")
    assert "was saved with launch.fsdp=true; resume with launch.fsdp=true" in refused(tmp_path / "state", LaunchConfig())
    shutil.rmtree(tmp_path / "state" / "fsdp")
    assert "was saved without launch.fsdp; resume with launch.fsdp=false" in refused(tmp_path / "state")


def test_a_checkpoint_holds_tensors_only(two, tmp_path):
    learner = make_learner(torch.float32, ALONE)
    learner.save(tmp_path)
    for file in (*(tmp_path / "fsdp").iterdir(), *(two / "float32" / "fsdp").iterdir()):
        assert load_file(file)  # safetensors cannot hold objects


def test_settings_that_fsdp_does_not_support_are_refused(caplog):
    with pytest.raises(UserError, match=r"launch.fsdp=true and launch.deepspeed='zero3' both shard the model"):
        check_launch(LaunchConfig(fsdp=True, deepspeed="zero3"))
    with pytest.raises(UserError, match=r"launch.offload='optimizer': offloading needs DeepSpeed"):
        check_launch(LaunchConfig(fsdp=True, offload="optimizer"))
    with caplog.at_level(logging.WARNING, logger="rlzoo"):
        make_learner(torch.bfloat16, ALONE, master_weights=False)
    assert "bfloat16 weights have no float32 copies" in caplog.text


def test_autocast_is_that_of_the_plain_path():
    batch = off_policy_batch(make_model(), FSPO())
    ours, theirs, full = (
        make_learner(torch.float32, launch, autocast=autocast).log_probs(batch)
        for launch, autocast in ((ALONE, "bfloat16"), (LaunchConfig(), "bfloat16"), (LaunchConfig(), "none"))
    )
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, full)


def test_one_process_needs_no_launcher():
    make_accelerator(ALONE, make_learner(torch.float32, ALONE).config)
    assert torch.distributed.get_world_size() == 1


def test_a_process_leaves_its_group_at_the_end():
    leave_process_group()  # does nothing without a group
    make_accelerator(ALONE, LearnerConfig())
    assert torch.distributed.is_initialized()
    leave_process_group()
    assert not torch.distributed.is_initialized()


def test_the_command_leaves_its_group_at_the_end(tmp_path, monkeypatch):
    overrides = ["rollout.num_prompts=2", "rollout.group_size=2", "eval.num_problems=0", "tracking.mlflow=false"]
    options = [word for override in overrides for word in ("--set", override)]
    run = ["train", "--clip", "fspo", "--fsdp", "--steps", "1", "--quiet", "--output", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", ["rlzoo", *run, *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["finished"]
    assert not torch.distributed.is_initialized()
