"""LoRA, gradient checkpointing and packing: what they change, and what they must not change."""

import copy
import dataclasses

import pytest
import torch

from rlzoo import UserError, load_zoo
from rlzoo.journal.run_directory import RunDirectory
from rlzoo.learner.micro_batches import cut
from rlzoo.models.adapters import has_adapter
from rlzoo.rollout.sampler import HFSampler
from tests.learner.test_learner import make_learner, relative_error, step_gradient
from tests.off_policy import PAD, VOCABULARY, make_model, off_policy_batch, take_step
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


def test_a_packed_micro_batch_respects_its_token_limit(model, fspo):
    batch = off_policy_batch(model, fspo)
    lengths = [len(sequence) for sequence in batch.sequences]
    pieces = cut(lengths, torch.arange(18), 100, packing=True)
    assert sorted(torch.cat(pieces).tolist()) == list(range(18))
    assert all(sum(lengths[row] for row in piece.tolist()) <= 100 for piece in pieces)
    assert len(pieces) < len(cut(lengths, torch.arange(18), 100))


def test_gradient_checkpointing_does_not_change_the_gradient(model, policy):
    batch = off_policy_batch(model, policy)
    plain, _ = step_gradient(model, policy, batch)
    checkpointed, _ = step_gradient(model, policy, batch, gradient_checkpointing=True)
    assert relative_error(checkpointed, plain) < 1e-5


def test_lora_trains_only_the_low_rank_update_and_exports_merged_weights(model, fspo):
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
    with directory.checkpoint(1, learner.language_model, weights, tokenizer(), fspo):
        pass
    directory.close()
    folder = tmp_path / "run" / "checkpoints" / "step-000001"
    ids = torch.arange(2, 12)[None]
    with torch.no_grad():
        expected = learner.language_model(input_ids=ids).logits
        whole = AutoModelForCausalLM.from_pretrained(folder)
        torch.testing.assert_close(whole(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-5)
        adapted = peft.PeftModel.from_pretrained(copy.deepcopy(model), folder / "adapter")
        torch.testing.assert_close(adapted(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-5)


def mixture(name):
    """A model whose experts share fused parameters; DeepSeek's router also has a buffer that is saved."""
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": PAD}
    mixing = {"num_experts_per_tok": 2, "initializer_range": 0.2, "eos_token_id": 1, "bos_token_id": None}
    if name == "olmoe":
        return transformers.OlmoeForCausalLM(
            transformers.OlmoeConfig(**sizes, **mixing, num_experts=5, intermediate_size=24)
        ).eval()
    return transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(
            **sizes, **mixing, n_routed_experts=6, moe_intermediate_size=24, intermediate_size=48, first_k_dense_replace=1,
            n_group=2, topk_group=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        )
    ).eval()  # fmt: skip


def tensors_of(model):
    """The parameters and saved buffers of a model by name; a tied tensor has one name."""
    kept = model.state_dict().keys()
    return {**dict(model.named_parameters()), **{name: each for name, each in model.named_buffers() if name in kept}}


def check_merged(learner, plain):
    """Check that a plain model and a sampler with the learner's weights have the logits of the adapted model."""
    weights, ids = dict(learner.weights()), torch.arange(2, 12)[None]
    assert {name: each.shape for name, each in weights.items()} == {
        name: each.shape for name, each in tensors_of(plain).items()
    }
    sampler = HFSampler(plain, tokenizer(), end_ids=frozenset({1}), max_new_tokens=4, way="generate", own_weights=True)
    sampler.update_weights(learner.weights())
    with torch.no_grad():
        before = plain(input_ids=ids).logits
        expected = learner.language_model(input_ids=ids).logits
        torch.testing.assert_close(sampler.model(input_ids=ids).logits, expected, atol=1e-4, rtol=1e-4)
        assert not torch.allclose(before, expected, atol=1e-2)


@pytest.mark.parametrize("target", ["all-linear", ["gate_proj", "up_proj", "down_proj"]], ids=["all", "experts"])
@pytest.mark.parametrize("name", ["olmoe", "deepseek"])
def test_adapted_experts_are_merged_under_their_own_names(name, target, fspo):
    plain = mixture(name)
    learner = make_learner(plain, fspo, lora={"rank": 3, "target": target}, lr=3e-2)
    take_step(learner, off_policy_batch(plain, fspo))
    changed = {key for key, each in learner.weights() if not torch.equal(each, tensors_of(plain)[key])}
    assert {"model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"} <= changed
    check_merged(learner, plain)


def test_an_untied_embedding_and_head_can_be_adapted(fspo):
    plain = make_model()
    plain.lm_head.weight = torch.nn.Parameter(plain.lm_head.weight.detach().clone())
    plain.config.tie_word_embeddings = False
    learner = make_learner(plain, fspo, lora={"rank": 4, "target": ["embed_tokens", "lm_head", "v_proj"]}, lr=3e-2)
    take_step(learner, off_policy_batch(plain, fspo))
    changed = {key for key, each in learner.weights() if not torch.equal(each, tensors_of(plain)[key])}
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= changed
    check_merged(learner, plain)


@pytest.mark.parametrize("target", ["lm_head", ["q_proj", "embed_tokens"], ".*(up_proj|lm_head)"])
def test_an_adapter_of_a_tied_tensor_is_refused(model, fspo, target):
    with pytest.raises(
        UserError, match=r"learner.lora.target: model.embed_tokens.weight and lm_head.weight are the same tensor"
    ):
        make_learner(model, fspo, lora={"rank": 4, "target": target})


def test_two_layers_with_one_weight_are_not_adapted(fspo):
    model = make_model()
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    with pytest.raises(
        UserError, match=r"layers.0.mlp.up_proj.weight and model.layers.1.mlp.up_proj.weight are the same tensor"
    ):
        make_learner(model, fspo, lora={"rank": 4})
    make_learner(model, fspo, lora={"rank": 4, "target": "q_proj"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_reads_an_adapted_weight_itself_is_refused(fspo, dtype):
    class Direct(torch.nn.Module):
        def __init__(self, mlp):
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj, self.act_fn = mlp.gate_proj, mlp.up_proj, mlp.down_proj, mlp.act_fn

        def forward(self, states):
            return self.down_proj(self.act_fn(self.gate_proj(states)) * torch.nn.functional.linear(states, self.up_proj.weight))

    model = make_model().to(dtype)
    for layer in model.model.layers:
        layer.mlp = Direct(layer.mlp)
    with pytest.raises(UserError, match=r"the merged weights do not reproduce the adapted Qwen3ForCausalLM"):
        make_learner(model, fspo, lora={"rank": 4, "target": "up_proj"})
    make_learner(model, fspo, lora={"rank": 4, "target": "down_proj"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["olmoe", "deepseek"])
def test_the_check_of_an_adapter_leaves_no_trace(name, dtype, fspo):
    plain, state = mixture(name).to(dtype), torch.random.get_rng_state()
    learner = make_learner(plain, fspo, lora={"rank": 4}, gradient_checkpointing=True)
    assert torch.equal(torch.random.get_rng_state(), state)
    training = {module for module in learner.language_model.modules() if module.training}
    assert training == set(learner.language_model.model.layers)
    for key, weight in learner.weights():
        assert torch.equal(weight, tensors_of(plain)[key]), key
    second = [each for key, each in learner.language_model.named_parameters() if "lora_B" in key]
    assert second
    assert not any(each.any() for each in second)


@pytest.mark.parametrize(
    ("target", "number"),
    [
        ("k_proj", 2),
        (["k_proj", "down_proj"], 4),
        ("mlp.up_proj", 2),
        ("model.layers.1.mlp.up_proj", 1),
        (r".*layers\.1\..*_proj", 7),
        (r".*\.(q|o)_proj", 4),
    ],
)
def test_targets_are_names_or_a_pattern(model, fspo, target, number):
    learner = make_learner(model, fspo, lora={"rank": 4, "target": target})
    adapted = [key for key, _ in learner.language_model.named_parameters() if "lora_A" in key]
    assert len(adapted) == number
    assert learner.language_model.peft_config["default"].r == 4


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("nowhere", r"target=\['nowhere'\]: Target modules"),
        (["q_proj", "nowhere"], r"target=\['q_proj', 'nowhere'\]: the model has no module 'nowhere'"),
        (r"(q_proj", r"target='\(q_proj': .*unterminated"),
        ("mlp", r"target=\['mlp'\]: Target module Qwen3MLP.* is not supported"),
    ],
)
def test_missing_target_modules_are_reported(model, fspo, target, problem):
    with pytest.raises(UserError, match=f"learner.lora.{problem}") as caught:
        make_learner(model, fspo, lora={"rank": 4, "target": target})
    assert "\n" not in str(caught.value)
