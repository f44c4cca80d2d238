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


def test_under_autocast_the_gradients_of_chunks_are_summed_in_float32(monkeypatch):
    monkeypatch.setattr(model_module, "LOGITS_PER_CHUNK", 64 * VOCABULARY)
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(32, VOCABULARY, bias=False), torch.randn(4096, 32)  # 64 chunks
    targets = torch.randint(VOCABULARY, (4096,))
    with torch.autocast("cpu", torch.bfloat16):
        model_module.chunked_log_probs(hidden, targets, head, 1.0)[0].sum().backward()
    weight = head.weight.detach().double().requires_grad_()
    (hidden.double() @ weight.T).log_softmax(-1).gather(-1, targets[:, None]).sum().backward()
    assert (head.weight.grad - weight.grad).norm() / weight.grad.norm() < 4e-3  # 2**-8; summed in bfloat16, it was 9e-3


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


def test_the_embedded_architecture_is_chunked():
    assert ResponseLogProbs(make_model()).chunked


BANNED = [0, 5, VOCABULARY - 1]


def banned(model):
    """Make a model give its banned tokens logits of -inf."""
    model.get_output_embeddings().register_forward_hook(
        lambda head, states, logits: logits.index_fill(-1, torch.tensor(BANNED), -torch.inf)
    )
    return model


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("is_chunked", [True, False])
def test_banned_tokens_have_probability_0_in_log_probs_entropies_and_gradients(monkeypatch, is_chunked, temperature):
    monkeypatch.setattr(model_module, "LOGITS_PER_CHUNK", 7 * VOCABULARY)
    inputs, allowed = batch(), torch.tensor([token for token in range(VOCABULARY) if token not in BANNED])
    inputs.input_ids[:] = allowed[inputs.input_ids % len(allowed)]
    expected_model = make_model()
    logits = expected_model(input_ids=inputs.input_ids).logits.index_select(-1, allowed) / temperature
    expected = logits.log_softmax(-1)  # over the allowed tokens alone
    targets = torch.searchsorted(allowed, inputs.input_ids)[:, 1:, None]
    picked = expected[:, :-1].gather(-1, targets)[..., 0][:, 3:11].flatten()
    entropies = -(expected.exp() * expected).sum(-1)[:, 3:11].flatten()
    module = ResponseLogProbs(banned(make_model()), temperature, entropy_gradient=True)
    module.chunked = is_chunked
    log_probs, entropy = module(inputs)
    torch.testing.assert_close(log_probs, picked, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, entropies, atol=1e-5, rtol=0)
    (log_probs.sum() + 3 * entropy.sum()).backward()
    (picked.sum() + 3 * entropies.sum()).backward()
    for got, want in zip(module.parameters(), expected_model.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, atol=1e-4, rtol=1e-4)


def test_a_sampled_token_that_is_banned_has_a_finite_log_prob_and_no_gradient():
    inputs, module = batch(), ResponseLogProbs(banned(make_model()))
    inputs.input_ids[:] = 5
    log_probs, entropy = module(inputs)
    assert log_probs.tolist() == [-1e6] * 40
    assert entropy.isfinite().all()
    log_probs.sum().backward()
    assert all(not bool(parameter.grad.any()) for parameter in module.parameters())
