"""Log-probs of response tokens: chunked equals plain, in value and gradient, for every kind of head."""

import copy

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from rlzoo.learner import log_probs as model_module
from rlzoo.learner.log_probs import ResponseLogProbs
from rlzoo.learner.micro_batches import ModelInputs
from tests.off_policy import VOCABULARY, make_model


def batch():
    rng = torch.Generator().manual_seed(0)
    input_ids = torch.randint(2, VOCABULARY, (5, 12), generator=rng)
    predicts = torch.zeros(5, 12, dtype=torch.bool)
    predicts[:, 3:11] = True
    ones = torch.ones_like(input_ids)
    return ModelInputs(input_ids, ones, torch.arange(12).expand(5, -1), predicts)


def plain(model, temperature=1.0):
    inputs = batch()
    log_probs = (model(input_ids=inputs.input_ids).logits.float() / temperature).log_softmax(-1)
    picked = log_probs[:, :-1].gather(-1, inputs.input_ids[:, 1:, None])[..., 0]
    entropy = -(log_probs.exp() * log_probs).sum(-1)[:, :-1]
    return picked[:, 3:11].flatten(), entropy[:, 3:11].flatten()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_chunked_log_probs_equal_plain_ones(monkeypatch, chunk, temperature):
    monkeypatch.setattr(model_module, "LOGITS_PER_CHUNK", chunk * VOCABULARY)
    model = make_model()
    expected_model = copy.deepcopy(model)
    log_probs, entropy = ResponseLogProbs(model, temperature)(batch())
    expected, expected_entropy = plain(expected_model, temperature)
    torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-5, rtol=0)
    weights = torch.linspace(-1, 1, len(log_probs))
    (log_probs * weights).sum().backward()
    (expected * weights).sum().backward()
    for got, want in zip(model.parameters(), expected_model.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, atol=1e-5, rtol=1e-4)


def test_a_model_that_caps_its_logits_takes_the_plain_path():
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        final_logit_softcapping=1.0,
        attn_implementation="eager",
        initializer_range=0.5,
    )
    model = Gemma2ForCausalLM(config)
    wrapped = ResponseLogProbs(model)
    assert not wrapped.chunked
    torch.testing.assert_close(wrapped(batch())[0], plain(model)[0], atol=1e-5, rtol=0)


def test_our_own_architecture_is_chunked():
    assert ResponseLogProbs(make_model()).chunked
