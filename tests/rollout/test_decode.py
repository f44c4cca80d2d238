"""Row-by-row decoding compared with transformers' `generate`, and the computations that it avoids."""

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from rlzoo.rollout.decode import decode
from rlzoo.rollout.draws import BLOCK, draw, row_uniforms
from rlzoo.rollout.open_responses import OpenResponses, RowLayer
from rlzoo.rollout.sampler import HFSampler
from tests.off_policy import VOCABULARY, make_model, plain_log_probs
from tests.rollout.test_sampler import END, PROMPTS, tokenizer
from tests.rules import few

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCABULARY, "initializer_range": 0.2}


def llama():
    return LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64, num_key_value_heads=2, **SIZES))


def gpt2():
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=VOCABULARY, initializer_range=0.2))


def qwen2():
    model = Qwen2ForCausalLM(Qwen2Config(hidden_size=32, intermediate_size=64, num_key_value_heads=2, **SIZES))
    for layer in model.model.layers:
        for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            torch.nn.init.normal_(linear.bias)
    return model


MODELS = {"qwen3": make_model, "qwen2": qwen2, "llama": llama, "gpt2": gpt2}


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("name", "way"), few([*((name, "fused") for name in MODELS if name != "gpt2"), *((name, "rows") for name in MODELS)], 2)
)
def test_decode_draws_the_same_tokens_as_generate(name, way, attention):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    model.set_attn_implementation(attention)
    settings = {"end_ids": frozenset({END, 7, 8}), "max_new_tokens": 90}
    ours = HFSampler(model, tokenizer("<pad>"), **settings, way=way)
    theirs = HFSampler(model, tokenizer("<pad>"), **settings, way="generate")
    for prompts in (PROMPTS, PROMPTS[:1]):  # with padding and without
        first, second = (each.sample(prompts, 9, seed=4, temperature=1.5) for each in (ours, theirs))
        lengths = sorted(len(rollout.response_ids) for rollout in first)
        assert lengths[0] < 20 < 40 < lengths[-1], "some end early, some late"
        for a, b in zip(first, second, strict=True):
            assert (a.response_ids, a.finished, a.text) == (b.response_ids, b.finished, b.text)
            torch.testing.assert_close(torch.tensor(a.rollout_log_probs), torch.tensor(b.rollout_log_probs), atol=1e-5, rtol=0)


def test_a_prompt_is_computed_once_and_an_ended_response_not_at_all():
    model = make_model().eval()
    sizes = []

    def hook(module, positional, inputs):
        sizes.append(tuple(inputs["input_ids"].shape))

    model.model.register_forward_pre_hook(hook, with_kwargs=True)
    prompts = [ids for ids in ((5, 6), (7, 8, 9, 10, 11), (12,)) for _ in range(10)]
    uniforms = row_uniforms(0, range(30), 60)
    decoded = decode(model, prompts, uniforms, end_ids=frozenset(range(20)), pad_id=0, temperature=1.0)
    lengths = (decoded.log_probs != 0).sum(dim=1)
    assert sizes[0] == (3, 5)
    # a response of n tokens takes n - 1 steps: its first token comes from the prompt, and nothing follows its last
    assert sizes[1:] == [(int((lengths > step).sum()), 1) for step in range(1, int(lengths.max()))]
    assert lengths.min() < lengths.max() == decoded.tokens.shape[1]
    ended = torch.isin(decoded.tokens, torch.arange(20)).int()
    finished = decoded.log_probs[:, -1] == 0
    assert (ended.argmax(dim=1)[finished] + 1 == lengths[finished]).all()


def test_remaining_rows_keep_their_cache_when_others_end():
    layer = RowLayer(torch.tensor([2, 3]), room=6)
    states = torch.arange(10.0).view(2, 1, 1, 5).repeat(1, 1, 2, 1)  # two prompts of two columns
    layer.update(states, -states)
    for column in range(3):
        new = 100.0 * (column + 1) + torch.arange(5.0).view(5, 1, 1, 1).expand(5, 1, 1, 5)
        keys, values = layer.update(new, -new)
    assert keys.shape == (5, 1, 5, 5)
    assert keys[3, 0, :, 0].tolist() == [5, 5, 103, 203, 303]
    layer.keep(3, movers=torch.tensor([4]), holes=torch.tensor([1]))  # rows 1 and 3 ended
    keys, values = layer.update(torch.zeros(3, 1, 1, 5), torch.zeros(3, 1, 1, 5))
    assert [row[0, :, 0].tolist() for row in keys] == [
        [0, 0, 100, 200, 300, 0],
        [5, 5, 104, 204, 304, 0],
        [5, 5, 102, 202, 302, 0],
    ]
    assert torch.equal(values, -keys)


def test_masks_and_positions_follow_the_rows():
    responses = OpenResponses(make_model(), [(5, 6), (5, 6), (7, 8, 9), (4,)], pad_id=0, limit=4)
    responses.first_logits()
    kept = responses.close(torch.tensor([True, False, False, False]), torch.tensor([11, 12, 13, 14]))
    assert kept.tolist() == [14, 12, 13]
    assert responses.rows.tolist() == [3, 1, 2]
    assert responses.positions[:, 0].tolist() == [1, 2, 3]
    assert responses.mask[:, 0, 0, :3].tolist() == [[False, False, True], [False, True, True], [True, True, True]]


def mistral():
    return MistralForCausalLM(
        MistralConfig(hidden_size=32, intermediate_size=64, num_key_value_heads=2, sliding_window=8, **SIZES)
    )


def bloom():
    return BloomForCausalLM(BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4))


@pytest.mark.parametrize("make", [mistral, bloom])
def test_a_model_with_another_cache_or_mask_is_sampled_with_generate(make, caplog):
    model = make()
    draws = HFSampler(model, tokenizer("<pad>"), end_ids=frozenset({END}), max_new_tokens=12)
    assert draws.way == "generate"
    assert "sampling with transformers' generate" in caplog.text
    for rollout in draws.sample(PROMPTS, 2, seed=3):
        sequence = torch.tensor(rollout.prompt_ids + rollout.response_ids)
        expected = plain_log_probs(model, sequence, len(rollout.response_ids)).detach()
        torch.testing.assert_close(torch.tensor(rollout.rollout_log_probs), expected, atol=1e-4, rtol=0)


def test_draws_are_those_of_the_cumulated_probabilities_of_a_large_vocabulary():
    torch.manual_seed(0)
    logits = 3 * torch.randn(5000, 5 * BLOCK + 17)
    numbers = torch.rand(5000, dtype=torch.float64)
    tokens, log_probs = draw(logits, numbers, temperature=0.7)
    expected = (logits.double() / 0.7).log_softmax(-1)
    cumulated = expected.exp().cumsum(-1)
    assert (tokens == torch.searchsorted(cumulated, numbers[:, None], right=True)[:, 0]).sum() >= 4999  # rounding at an edge
    torch.testing.assert_close(log_probs.double(), expected.gather(-1, tokens[:, None])[:, 0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("number", [0.0, 0.25, 1 - 2**-53, 1.0])
def test_a_token_without_probability_is_never_drawn(number):
    logits = torch.full((1, 3 * BLOCK), -torch.inf)
    logits[0, [3, BLOCK + 5]] = 0.0
    token, log_prob = draw(logits, torch.tensor([number], dtype=torch.float64), temperature=1.0)
    assert token.item() == (3 if number < 0.5 else BLOCK + 5)
    assert log_prob.item() == pytest.approx(-0.6931472)
