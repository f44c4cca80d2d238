"""LoRA, gradient checkpointing and packing: what they change, and what they must not change."""

import copy
import dataclasses

import pytest
import torch

from rlzoo import UserError, load_zoo
from rlzoo.journal.run_directory import RunDirectory
from rlzoo.learner.log_probs import check_packing
from rlzoo.learner.micro_batches import cut
from rlzoo.models.adapters import has_adapter
from tests.learner.test_learner import make_learner, relative_error, step_gradient
from tests.off_policy import make_model, off_policy_batch, take_step
from tests.rollout.test_sampler import tokenizer


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture
def fspo():
    return load_zoo()["fspo"]()


def test_packed_rows_have_the_gradient_of_padded_ones(model, policy):
    batch = off_policy_batch(model, policy)
    padded, objective = step_gradient(model, policy, batch)
    for max_tokens in (1, 100, 100_000):
        packed, value = step_gradient(model, policy, batch, packing=True, max_tokens_per_micro_batch=max_tokens)
        assert relative_error(packed, padded) < 1e-5
        assert value == pytest.approx(objective, rel=1e-5)


def test_a_packed_micro_batch_holds_up_to_its_tokens(model, fspo):
    batch = off_policy_batch(model, fspo)
    lengths = [len(sequence) for sequence in batch.sequences]
    pieces = cut(lengths, torch.arange(18), 100, packing=True)
    assert sorted(torch.cat(pieces).tolist()) == list(range(18))
    assert all(sum(lengths[row] for row in piece.tolist()) <= 100 for piece in pieces)
    assert len(pieces) < len(cut(lengths, torch.arange(18), 100))


def test_a_model_that_mixes_packed_rows_is_refused(model):
    class Mixing(type(model)):
        def forward(self, *args, position_ids=None, **kwargs):
            return super().forward(*args, **kwargs)

    mixing = copy.deepcopy(model)
    mixing.__class__ = Mixing
    with pytest.raises(UserError, match=r"learner.packing: Mixing with attention 'sdpa' mixes packed rows"):
        check_packing(mixing)
    check_packing(model)


def test_gradient_checkpointing_leaves_the_gradient_as_it_is(model, policy):
    batch = off_policy_batch(model, policy)
    plain, _ = step_gradient(model, policy, batch)
    learner = make_learner(model, policy, gradient_checkpointing=True)
    assert all(layer.gradient_checkpointing and layer.training for layer in learner.language_model.model.layers)
    checkpointed, _ = step_gradient(model, policy, batch, gradient_checkpointing=True)
    assert relative_error(checkpointed, plain) < 1e-5


def test_lora_trains_the_low_rank_update_alone_and_weights_are_whole(model, fspo):
    batch = off_policy_batch(model, fspo)
    learner = make_learner(model, fspo, lora={"rank": 4}, lr=1e-2)
    take_step(learner, batch)
    take_step(learner, batch)
    weights, before = dict(learner.weights()), dict(model.named_parameters())
    assert weights.keys() == before.keys()
    changed = {name for name in weights if not torch.equal(weights[name], before[name])}
    assert changed
    assert all("proj" in name for name in changed)
    plain = copy.deepcopy(model)
    plain.load_state_dict(weights, strict=False)
    ids = torch.arange(2, 12)[None]
    with torch.no_grad():
        expected = learner.language_model(input_ids=ids).logits
        torch.testing.assert_close(plain(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(model(input_ids=ids).logits, expected, atol=1e-3)


def test_the_reference_of_a_low_rank_update_is_the_base_model(model, fspo):
    batch = off_policy_batch(model, fspo)
    learner = make_learner(model, fspo, lora={"rank": 4}, lr=1e-2, kl_coef=0.1)
    assert learner.reference is None
    start, reference = learner.log_probs(batch), learner.reference_log_probs(batch)
    torch.testing.assert_close(reference, start, atol=1e-5, rtol=0)
    take_step(learner, dataclasses.replace(batch, ref_log_probs=reference))
    torch.testing.assert_close(learner.reference_log_probs(batch), reference)
    assert not torch.allclose(learner.log_probs(batch), start, atol=1e-3)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # PEFT uses the old name
def test_a_checkpoint_of_a_low_rank_update_loads_in_plain_transformers_and_in_peft(model, fspo, tmp_path):
    import peft
    from transformers import AutoModelForCausalLM

    batch = off_policy_batch(model, fspo)
    learner = make_learner(model, fspo, lora={"rank": 4}, lr=1e-2)
    take_step(learner, batch)
    assert has_adapter(learner.language_model)
    directory = RunDirectory.create(tmp_path / "run", "")
    weights = dict(learner.weights())
    written = directory.begin_checkpoint("step-000001", learner.language_model, weights, tokenizer(), fspo)
    directory.finish_checkpoint(written, keep=1)
    directory.close()
    folder = tmp_path / "run" / "checkpoints" / "step-000001"
    ids = torch.arange(2, 12)[None]
    with torch.no_grad():
        expected = learner.language_model(input_ids=ids).logits
        whole = AutoModelForCausalLM.from_pretrained(folder)
        torch.testing.assert_close(whole(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-5)
        adapted = peft.PeftModel.from_pretrained(copy.deepcopy(model), folder / "adapter")
        torch.testing.assert_close(adapted(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-5)


def test_modules_that_are_not_there_are_named(model, fspo):
    with pytest.raises(UserError, match=r"learner.lora.target='nowhere': Target modules"):
        make_learner(model, fspo, lora={"rank": 4, "target": "nowhere"})
