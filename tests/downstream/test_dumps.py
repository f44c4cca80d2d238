"""Dumps that the trainers' own code has written, as rollout files.

verl's cache of rollouts needs verl, prime-rl's export a checkout in RLZOO_PRIME_RL, SkyRL's batch the package skyrl, of which
one file is loaded: the whole needs Python 3.12.
"""

import importlib
import importlib.util
import sys
import types
import warnings

import numpy as np
import pytest
import torch

from rlzoo.errors import UserError
from rlzoo.integrations.dumps import read_dumps
from tests.downstream.test_prime_rl import needs_checkout, real
from tests.integrations.test_dumps import (
    ADVANTAGES,
    CHOSEN,
    OLD,
    REWARDS,
    SAMPLER,
    TOKENS,
    check_common,
    skyrl_batch,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of the libraries
needs_verl = pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed")
SIZES = [3, 1, 2]  # of the responses


def run_config(folder):
    from omegaconf import OmegaConf

    return OmegaConf.create({
        "trainer": {"experiment_name": "e", "project_name": "p", "v1": {"trainer_mode": "sync", "sync": {}}},
        "actor_rollout_ref": {"rollout": {"n": 2}}, "data": {"train_batch_size": 2, "max_response_length": 4},
    }), OmegaConf.create({"action": "cache", "enable": True, "dump_dir": str(folder), "steps": []})  # fmt: skip


@needs_verl
def test_the_cache_of_verls_trainer(tmp_path, monkeypatch):
    from tensordict import NonTensorStack, TensorDict
    from verl.utils.skip import RolloutTqSkip

    def nested(rows, dtype):
        return torch.nested.as_nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)

    def responses(rows, dtype):
        return nested([row[-size:] for row, size in zip(rows, SIZES, strict=True)], dtype)

    kept = {
        "prompts": nested([row[:-size] for row, size in zip(TOKENS, SIZES, strict=True)], torch.int64),
        "responses": responses(TOKENS, torch.int64), "response_mask": responses(CHOSEN, torch.int64),
        "rollout_log_probs": responses(SAMPLER, torch.float32),
        "rm_scores": nested([[0.0, 0.0, 1.0], [0.0], [0.0, 2.0]], torch.float32),
        "uid": NonTensorStack("a", "a", "b"), "reward_model": NonTensorStack(*[{"ground_truth": "2"}] * 3),
    }  # fmt: skip
    # the queue that the trainer keeps its rollouts in, between processes
    queue = types.ModuleType("transfer_queue")
    queue.kv_batch_get = lambda keys, partition_id: TensorDict(kept, batch_size=[3])
    monkeypatch.setitem(sys.modules, "transfer_queue", queue)
    config, local = run_config(tmp_path)
    batch = types.SimpleNamespace(keys=["a_0_0", "a_1_0", "b_0_0"], tags=[{}] * 3, partition_id="train")
    RolloutTqSkip(local, config).prepare_data(5, batch, 5)
    (step,) = read_dumps("verl", [tmp_path])
    check_common(step, 5)
    assert step.rewards.tolist() == REWARDS
    assert (step.old_log_probs, step.advantages, step.updates) == (None, None, ())
    del kept["rollout_log_probs"]
    RolloutTqSkip(local, config).prepare_data(6, batch, 6)
    with pytest.raises(UserError, match=r"no rollout_log_probs: set actor_rollout_ref\.rollout\.calculate_log_probs=true"):
        list(read_dumps("verl", [tmp_path]))


@needs_verl
@pytest.mark.parametrize("with_uid", [True, False])
def test_the_cache_of_verls_older_trainer(with_uid, tmp_path):
    from verl import DataProto
    from verl.utils.skip import RolloutSkip

    def padded(rows, dtype=torch.int64):  # prompts on the left, responses on the right
        prompts = torch.zeros(3, 4, dtype=dtype)
        answers = torch.zeros(3, 5, dtype=dtype)
        for index, (row, size) in enumerate(zip(rows, SIZES, strict=True)):
            prompts[index, 4 - len(row[:-size]) :] = torch.tensor(row[:-size], dtype=dtype)
            answers[index, :size] = torch.tensor(row[-size:], dtype=dtype)
        return prompts, answers

    prompts, answers = padded(TOKENS)
    scores = torch.zeros(3, 5)
    scores[torch.arange(3), torch.tensor(SIZES) - 1] = torch.tensor(REWARDS)
    data = DataProto.from_dict(
        {"prompts": prompts, "responses": answers, "input_ids": torch.cat([prompts, answers], 1),
         "attention_mask": torch.cat(padded([[1] * len(row) for row in TOKENS]), 1), "response_mask": padded(CHOSEN)[1],
         "rollout_log_probs": padded(SAMPLER, torch.float32)[1], "rm_scores": scores},
        non_tensors={"uid": np.array(["a", "a", "b"], dtype=object)} if with_uid else {},
        meta_info={"timing": {"generate": 1.0}, "temperature": 1.0},
    )  # fmt: skip
    config, local = run_config(tmp_path)
    RolloutSkip(local, config).prepare_data(2, data)
    (step,) = read_dumps("verl", [tmp_path])
    check_common(step, 2)
    assert step.rewards.tolist() == REWARDS


@needs_verl
def test_verls_texts_are_refused(tmp_path):
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    RayPPOTrainer._write_generations(["1+1="], ["2"], ["2"], [1.0], {}, str(tmp_path), 3)
    with pytest.raises(UserError, match="texts and scores, without tokens and log-probs"):
        list(read_dumps("verl", [tmp_path]))


@needs_checkout
def test_the_token_export_of_prime_rl(tmp_path):
    real()
    from prime_rl.configs.trainer import CustomLossConfig

    exports = importlib.import_module("prime_rl.trainer.rl.token_export")
    padding = 2

    def packed(rows, dtype, fill=0):
        return torch.tensor([[value for row in rows for value in row] + [fill] * padding], dtype=dtype)

    micro_batch = {
        "input_ids": packed(TOKENS, torch.int64), "position_ids": packed([range(len(row)) for row in TOKENS], torch.int64),
        "loss_mask": packed(CHOSEN, torch.bool), "inference_logprobs": packed(SAMPLER, torch.float32),
        "advantages": packed([[value] * len(row) for value, row in zip(ADVANTAGES, TOKENS, strict=True)], torch.float32),
        "env_names": ["sums"] * 11 + [""] * padding,
    }  # fmt: skip
    output = {"logprobs": packed(OLD, torch.float32, torch.nan), "entropy": packed(OLD, torch.float32)}
    exporter = exports.TokenExporter(tmp_path, rank=0)
    loss = CustomLossConfig(import_path="rlzoo.integrations.prime_rl.loss")
    exporter.export(7, 0, micro_batch, output, [5, 3, 3 + padding], loss)
    exporter.mark_stable()
    exporter.close()
    (step,) = read_dumps("prime-rl", [tmp_path])
    check_common(step, 7)
    assert step.updates[0].log_probs.tolist() == [-1.5, -2.5, -3.5, -4.5, -5.5]
    assert step.advantages.tolist() == ADVANTAGES


@pytest.mark.skipif(importlib.util.find_spec("skyrl") is None, reason="skyrl is not installed")
def test_the_data_batch_of_skyrl(tmp_path, monkeypatch):
    place = next(iter(importlib.util.find_spec("skyrl").submodule_search_locations))
    for name in ("skyrl", "skyrl.backends", "skyrl.backends.skyrl_train", "skyrl.backends.skyrl_train.utils"):
        package = types.ModuleType(name)
        package.__path__ = [place.removesuffix("skyrl") + name.replace(".", "/")]  # without what the package imports
        monkeypatch.setitem(sys.modules, name, package)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module("skyrl.backends.skyrl_train.training_batch")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    (tmp_path / "dumped_data").mkdir()
    skyrl_batch(module.TrainingInputBatch).save(tmp_path / "dumped_data" / "global_step_3_training_input.pkl")
    (step,) = read_dumps("skyrl", [tmp_path])
    check_common(step, 3)
    assert step.advantages.tolist() == ADVANTAGES
