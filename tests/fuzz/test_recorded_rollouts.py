"""Recorded rollouts: a torn or changed file is replayed, or rejected by name."""

import math
import shutil
import struct

import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, safe_open, save

from rlzoo import load_zoo
from rlzoo.lab.recorded import RecordedRun
from rlzoo.lab.replay import replay
from tests.fuzz.law import SURFACES, held_to_the_law
from tests.fuzz.spoiled import holding, spoiled_bytes, spoiled_json

SURFACE = SURFACES["recorded rollouts"]
NUMBERS = [0.0, -0.0, 1.0, -1e30, 3e38, math.nan, math.inf, -math.inf, 2**31, -1, 2**62]
DTYPES = [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool, torch.uint8, torch.complex64]
NAMES = [
    "token_ids",
    "sequence_lengths",
    "response_mask",
    "group_ids",
    "rewards",
    "advantages",
    "old_log_probs",
    "rollout_log_probs",
]
NAMES += ["turn_ids", "finished", "policy_versions", "rows/0", "rows/1", "rows/3", "log_probs/0", "log_probs/1", "log_probs/3"]


@pytest.fixture(scope="module")
def one_step(small_run, tmp_path_factory):
    """A copy of the run with only its second step."""
    folder = tmp_path_factory.mktemp("fuzz") / "one"
    shutil.copytree(small_run, folder, ignore=shutil.ignore_patterns("checkpoints", "000001.*"))
    return folder


@pytest.fixture(scope="module")
def zoo():
    return load_zoo()


def read(folder, policies=()):
    run = RecordedRun.read(folder)
    for policy in (run.own_rule, *policies):
        assert 0 <= replay(run, policy).profile.clip_fraction <= 1


@st.composite
def spoiled_tensors(draw):
    """Change one to three tensors: cut, stretched, with another type or shape, or with other values."""
    changes = []
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["value", "value", "value", "cut", "double", "dtype", "shape", "drop", "copy", "add"]))
        changes.append((kind, draw(st.sampled_from(NAMES)), draw(st.sampled_from(NUMBERS)), draw(st.integers(0, 10**6))))
    return changes


def _fitting(value, dtype):
    """Return the value, or the nearest value of a type."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.tensor(value, dtype=torch.float64).to(dtype)
    if dtype == torch.bool or not math.isfinite(value):
        return 0
    return max(torch.iinfo(dtype).min // 2, min(torch.iinfo(dtype).max // 2, int(value)))


def changed(tensors, changes):
    tensors = dict(tensors)
    for kind, name, value, place in changes:
        if name not in tensors or tensors[name].ndim == 0:
            continue
        tensor = tensors[name].clone()
        flat = tensor.view(-1)
        if kind == "value" and len(flat):
            flat[place % len(flat)] = _fitting(value, tensor.dtype)
        elif kind == "cut":
            tensor = tensor[: place % (len(tensor) + 1)]
        elif kind == "double":
            tensor = torch.cat([tensor, tensor])
        elif kind == "dtype":
            tensor = tensor.to(DTYPES[place % len(DTYPES)])
        elif kind == "shape":
            tensor = [tensor[None], tensor[:, None], flat[0] if len(flat) else tensor, tensor.expand(1, 2, *tensor.shape)][
                place % 4
            ]
        elif kind == "add" and tensor.dtype != torch.bool:
            tensor = tensor + 1
        if kind == "drop":
            del tensors[name]
        elif kind == "copy":
            tensors[NAMES[place % len(NAMES)]] = tensor.clone()
        else:
            tensors[name] = tensor.contiguous().clone()
    return tensors


@pytest.mark.filterwarnings("default")  # complex numbers are converted to real ones
@held_to_the_law("recorded rollouts", 0.65, changes=spoiled_tensors())
def test_rollouts_with_other_tensors(one_step, zoo, changes):
    file = one_step / "rollouts" / "000002.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    with holding(file, save(changed(load_file(file), changes), metadata)):
        SURFACE.check(lambda: read(one_step, [zoo["grpo"]()]), str(one_step))


@held_to_the_law("recorded rollouts", 0.2, data=st.data())
def test_corrupted_rollout_files(one_step, data):
    file = one_step / "rollouts" / "000002.safetensors"
    with holding(file, data.draw(spoiled_bytes([file.read_bytes()]))):
        SURFACE.check(lambda: read(one_step), str(one_step))


@held_to_the_law("recorded rollouts", 0.15, data=st.data(), size=st.sampled_from([None, 0, 1, 10**6, 2**40, 2**63, 2**64 - 1]))
def test_corrupted_headers_of_rollout_files(one_step, data, size):
    file = one_step / "rollouts" / "000002.safetensors"
    good = file.read_bytes()
    end = 8 + struct.unpack("<Q", good[:8])[0]
    header = data.draw(spoiled_json(good[8:end]))
    with holding(file, struct.pack("<Q", len(header) if size is None else size) + header + good[end:]):
        SURFACE.check(lambda: read(one_step), str(one_step))
