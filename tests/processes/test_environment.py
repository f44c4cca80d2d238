"""Variables in the environment change no number; impossible and unsupported launches are refused in one line."""

import logging
import socket

import pytest
import torch

from rlzoo.cli.launch import _environment
from rlzoo.config.run_config import RunConfig
from rlzoo.config.sections import LaunchConfig, LearnerConfig
from rlzoo.core.errors import RunError, UserError
from rlzoo.gate.launch import check_launcher
from rlzoo.lab.sweep import slots
from rlzoo.models.processes import make_accelerator
from tests.processes.worker import three_updates
from tests.rules import few

VARIABLES = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3",
    "ACCELERATE_GRADIENT_CLIPPING": "1e-4",
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "ACCELERATE_DYNAMO_BACKEND": "eager",
    "ACCELERATE_TORCH_DEVICE": "meta",
    "ACCELERATE_FP8_BACKEND": "TE",
    "ACCELERATE_DOWNCAST_BF16": "true",
    "ACCELERATE_DEBUG_MODE": "perhaps",
    "ACCELERATE_USE_CPU": "",
    "ACCELERATE_USE_MEGATRON_LM": "true",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "FSDP_OFFLOAD_PARAMS": "true",
    "PARALLELISM_CONFIG_TP_SIZE": "2",
}


@pytest.fixture(scope="module")
def expected():
    return three_updates("fspo", {})


def assert_same(result, expected):
    (updates, weights), (expected_updates, expected_weights) = result, expected
    assert updates == expected_updates
    assert all(torch.equal(tensor, expected_weights[name]) for name, tensor in weights.items())


@pytest.mark.parametrize("name", few(VARIABLES, 5))
def test_no_variable_of_accelerate_changes_a_gradient(monkeypatch, expected, name):
    monkeypatch.setenv(name, VARIABLES[name])
    assert_same(three_updates("fspo", {}), expected)


def test_ignored_variables_are_named_in_one_warning(monkeypatch, caplog):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "default")
    with caplog.at_level(logging.WARNING, logger="rlzoo"):
        make_accelerator(LaunchConfig(), LearnerConfig())
    (record,) = caplog.records
    assert record.getMessage() == (
        "ignoring ACCELERATE_GRADIENT_ACCUMULATION_STEPS, ACCELERATE_MIXED_PRECISION in the environment: "
        "the run's settings decide this"
    )


@pytest.mark.parametrize(
    "rank", [{}, {"LOCAL_RANK": "0"}, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "tcp://a"}]
)
def test_one_process_needs_no_address(monkeypatch, expected, rank):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", **rank}.items():
        monkeypatch.setenv(name, value)
    assert_same(three_updates("fspo", {}), expected)


TWO = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"RANK": "1", "WORLD_SIZE": "1"}, "RANK=1, which must be below WORLD_SIZE=1; unset both"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK=0, which must be below WORLD_SIZE=0"),
        ({**TWO, "RANK": "5"}, "RANK=5, which must be below WORLD_SIZE=2"),
        ({**TWO, "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK=1, which must be below LOCAL_WORLD_SIZE=1"),
        ({**TWO, "LOCAL_RANK": "-2"}, "LOCAL_RANK='-2', which is not a number; unset it"),
        ({"RANK": "-1", "WORLD_SIZE": "1"}, "RANK='-1', which is not a number"),
        ({"RANK": "01", "WORLD_SIZE": "2"}, "RANK='01', which is not a number"),
        ({"RANK": "", "WORLD_SIZE": "1"}, "RANK='', which is not a number"),
        ({"RANK": "0"}, "RANK=0, as if a launcher had started this process, but no WORLD_SIZE; unset RANK"),
        ({"WORLD_SIZE": "3"}, "WORLD_SIZE=3, as if a launcher had started this process, but no RANK"),
        ({name: value for name, value in TWO.items() if name != "MASTER_ADDR"}, "but no MASTER_ADDR"),
        ({name: value for name, value in TWO.items() if name != "MASTER_PORT"}, "but no MASTER_PORT"),
        ({"PMI_SIZE": "4"}, "PMI_SIZE=4, as if a launcher had started this process, but no WORLD_SIZE"),
        ({"ACCELERATE_USE_FSDP": "1"}, "asks for FSDP; remove it there, and pass --fsdp"),
        ({"ACCELERATE_USE_DEEPSPEED": "yes"}, "asks for DeepSpeed; remove it there"),
    ],
)
def test_impossible_and_unsupported_launches_are_refused(monkeypatch, variables, line):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=line):
        check_launcher(LaunchConfig())


@pytest.mark.parametrize(("settings", "precision"), [({}, "highest"), ({"tf32": True}, "high")])
def test_the_settings_determine_tf32(settings, precision):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")  # as a user's program or torch's environment variable may have done
        make_accelerator(LaunchConfig(), LearnerConfig(**settings))
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_real_launch_and_no_launch_pass(monkeypatch):
    check_launcher(LaunchConfig())
    for name, value in {**TWO, "LOCAL_WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "false", "PMI_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    check_launcher(LaunchConfig())
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    check_launcher(LaunchConfig(deepspeed="zero2"))


def test_unreachable_ranks_end_the_run_in_one_line(monkeypatch):
    with socket.socket() as taken:  # so that rank 0 cannot listen at this port
        taken.bind(("localhost", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for name, value in {**TWO, "RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(RunError, match=rf"the other ranks cannot be reached \(rank 0 of 2, at localhost:{port}\)"):
            make_accelerator(LaunchConfig(), LearnerConfig())


def test_threads_follow_the_affinity(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(6)))
    assert _environment(3, RunConfig.compose(clip="fspo"))["OMP_NUM_THREADS"] == "2"
    assert [slot["OMP_NUM_THREADS"] for slot in slots(2)] == ["3", "3"]
