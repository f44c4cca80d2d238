"""Rollout files from truncated sampling contain the sets of kept tokens, so that recorded tokens can be scored again."""

import dataclasses
import re

import pytest
import torch

from rlzoo.core.errors import UserError
from rlzoo.journal.rollout_file import RolloutFile
from rlzoo.lab.rescore import rescore
from tests.quick import quick_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    overrides = ["rollout.top_p=0.9", "rollout.temperature=1.3", "learner.num_minibatches=2"]
    return quick_run(tmp_path_factory.mktemp("kept") / "run", "grpo", *overrides, "checkpoint.every=1", steps=1).path


@pytest.fixture
def recorded(run):
    return RolloutFile.load(run / "rollouts" / "000001.safetensors")


def test_recorded_old_log_probs_equal_those_of_the_sampler(recorded):
    assert (recorded.kept_ids.dtype, recorded.kept_sizes.dtype) == (torch.int32, torch.int32)
    assert int((recorded.kept_sizes > 1).sum()) > 20
    torch.testing.assert_close(recorded.old_log_probs, recorded.rollout_log_probs, atol=1e-5, rtol=0)


def test_rescoring_is_over_the_kept_tokens(run, recorded, tmp_path):
    first = "embedded"  # the weights before the first step
    rescore([run], tmp_path / "new", [first], old=first)
    made = RolloutFile.load(tmp_path / "new" / "000001.safetensors")
    torch.testing.assert_close(made.old_log_probs, recorded.old_log_probs, atol=1e-5, rtol=0)
    assert torch.equal(made.kept_ids, recorded.kept_ids)
    dataclasses.replace(recorded, kept_ids=None, kept_sizes=None).save(tmp_path / "without.safetensors")
    rescore([tmp_path / "without.safetensors"], tmp_path / "off", [first], old=first)
    off = RolloutFile.load(tmp_path / "off" / "without.safetensors").old_log_probs - recorded.old_log_probs
    assert float(off.abs().max()) > 0.05


def without_its_token(step):
    ids = step.kept_ids.clone()
    ids[: int(step.kept_sizes[0])] = (step.token_ids[step.response_mask][0] + 1).int()
    return {"kept_ids": ids}


BROKEN = {
    "kept_sizes is missing": lambda step: {"kept_sizes": None},
    "kept_ids is missing": lambda step: {"kept_ids": None},
    "kept_sizes has 3 values for": lambda step: {"kept_sizes": step.kept_sizes[:3]},
    "kept_sizes sums to": lambda step: {"kept_ids": step.kept_ids[:-1]},
    "kept_sizes has a negative value": lambda step: {"kept_sizes": -step.kept_sizes},
    "kept_ids has data type torch.int64, not torch.int32": lambda step: {"kept_ids": step.kept_ids.long()},
    "kept_ids lacks a token that the model chose": without_its_token,
}


@pytest.mark.parametrize("problem", BROKEN)
def test_inconsistent_kept_sets_are_refused(recorded, tmp_path, problem):
    dataclasses.replace(recorded, **BROKEN[problem](recorded)).save(tmp_path / "000001.safetensors")
    with pytest.raises(UserError, match=f"cannot be used as a rollout file: {re.escape(problem)}"):
        RolloutFile.load(tmp_path / "000001.safetensors")
