"""The fused step of Llama-like models: where it is used, with every data type, and never with an adapter."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlzoo.config.sections import LearnerConfig
from rlzoo.models.adapters import prepare_for_training
from rlzoo.models.fast_cpu import fused
from rlzoo.models.fast_cpu.fused import can_fuse
from rlzoo.rollout.decode import decode
from rlzoo.rollout.draws import row_uniforms
from rlzoo.rollout.sampler import HFSampler
from tests.off_policy import make_model, plain_log_probs
from tests.rollout.test_decode import MODELS, SIZES, bloom, gpt2, mistral, qwen2
from tests.rollout.test_sampler import END, PROMPTS, tokenizer

ROWS = [ids for ids in ((5, 6), (7, 8, 9, 10, 11), (12,)) for _ in range(4)]


def sampled(model, **settings):
    uniforms = row_uniforms(3, range(len(ROWS)), 20)
    return decode(model.eval(), ROWS, uniforms, end_ids=frozenset({END}), pad_id=0, temperature=1.0, **settings)


def plain(model, decoded):
    """Return log-probs of the sampled tokens, one row at a time, without a cache; 0 after the end."""
    expected = torch.zeros(decoded.log_probs.shape)
    for row, (prompt, tokens) in enumerate(zip(ROWS, decoded.tokens, strict=True)):
        number = int((decoded.log_probs[row] != 0).sum())
        sequence = torch.cat([torch.tensor(prompt), tokens[:number]])
        expected[row, :number] = plain_log_probs(model, sequence, number).detach()
    return expected


def rope(kind, **settings):
    parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **settings}
    return LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64, rope_parameters=parameters, **SIZES))


def gelu():
    return LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64, hidden_act="gelu", mlp_bias=True, **SIZES))


@pytest.mark.parametrize(
    ("make", "way"),
    [
        (make_model, "fused"),
        (qwen2, "fused"),
        (gelu, "fused"),
        (lambda: rope("yarn"), "fused"),
        (lambda: rope("dynamic"), "rows"),
        (gpt2, "rows"),
        (mistral, "generate"),
        (bloom, "generate"),
    ],
    ids=["qwen3", "qwen2", "gelu", "yarn", "dynamic", "gpt2", "sliding", "alibi"],
)
def test_the_fastest_sampling_path_is_chosen_for_the_architecture(make, way):
    draws = HFSampler(make(), tokenizer("<pad>"), end_ids=frozenset({END}), max_new_tokens=12)
    assert draws.way == way


@pytest.mark.parametrize("make", [make_model, qwen2, gelu, lambda: rope("yarn")], ids=["qwen3", "qwen2", "gelu", "yarn"])
@pytest.mark.parametrize("joined_bytes", [0, 2**30])
def test_log_probs_equal_those_of_the_model(make, joined_bytes, monkeypatch):
    monkeypatch.setattr(fused, "JOINED_BYTES", joined_bytes)
    torch.manual_seed(0)
    model = make().eval()
    decoded = sampled(model, fuses=True)
    torch.testing.assert_close(decoded.log_probs, plain(model, decoded), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "gpt2"])
def test_the_bfloat16_error_is_no_larger_than_that_of_the_model(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    exact = model.eval()
    decoded = sampled(exact, fuses=True)
    reference = plain(exact, decoded)
    half = MODELS[name]().to(torch.bfloat16).eval()
    half.load_state_dict({key: value.bfloat16() for key, value in exact.state_dict().items()})
    ours = sampled(half, fuses=True)
    theirs = plain(half, decoded)
    spread = float((theirs - reference).abs().max())  # of the model's own bfloat16
    same = (ours.tokens == decoded.tokens).cumprod(dim=1).bool() & (ours.log_probs != 0)  # until the texts differ
    assert same.sum() > len(ROWS)
    assert float((ours.log_probs - reference)[same].abs().max()) < 3 * spread


def test_autocast_determines_the_computation_dtype():
    model = make_model().eval()
    exact = sampled(model, fuses=True)
    with torch.autocast("cpu", torch.bfloat16):
        half = sampled(model, fuses=True)
    same = (half.tokens == exact.tokens).cumprod(dim=1).bool()
    difference = (half.log_probs - exact.log_probs)[same].abs().max()
    assert 1e-5 < difference < 0.2


def test_an_adapter_is_not_left_out():
    model = make_model()
    draws = HFSampler(model, tokenizer("<pad>"), end_ids=frozenset({END}), max_new_tokens=12)
    assert draws.way == "fused"
    prepare_for_training(model, LearnerConfig.model_validate({"lora": {"rank": 4}}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    assert not can_fuse(model)
    for rollout in draws.sample(PROMPTS, 2, seed=3):
        sequence = torch.tensor(rollout.prompt_ids + rollout.response_ids)
        expected = plain_log_probs(model, sequence, len(rollout.response_ids)).detach()
        torch.testing.assert_close(torch.tensor(rollout.rollout_log_probs), expected, atol=1e-4, rtol=0)


def test_new_weights_are_seen():
    model = make_model().eval()
    before = sampled(model, fuses=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    after = sampled(model, fuses=True)
    assert not torch.equal(before.tokens, after.tokens)
    torch.testing.assert_close(after.log_probs, plain(model, after), atol=1e-5, rtol=0)
