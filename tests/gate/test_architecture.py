"""The shape of a model: its number of parameters matches the real model, and it is found without weights."""

import json

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rlzoo import UserError
from rlzoo.gate.architecture import KNOWN, Architecture, find_architecture, model_file

SIZES = {
    "vocab_size": 101,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("config_class", "model_class", "more"),
    [
        (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 8}),
        (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 4, "attention_bias": True}),
        (Qwen2Config, Qwen2ForCausalLM, {}),
        (LlamaConfig, LlamaForCausalLM, {}),
        (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
        (MistralConfig, MistralForCausalLM, {}),
    ],
)
def test_parameters_are_counted_as_the_real_model_has_them(tmp_path, config_class, model_class, more, tied):
    config = config_class(**SIZES, **more, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = model_class(config)
    config.save_pretrained(tmp_path)
    architecture = find_architecture(str(tmp_path))
    assert architecture.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    layer = model.model.layers[0]
    assert architecture.layer_parameters == sum(parameter.numel() for parameter in layer.parameters())
    real = {name.rpartition(".")[2]: module for name, module in layer.named_modules() if isinstance(module, torch.nn.Linear)}
    assert architecture.linears == {name: (module.in_features, module.out_features) for name, module in real.items()}


def test_the_models_of_the_papers_have_the_parameters_of_their_cards():
    # model cards: 1.7 and 8.2 billion, without embeddings 1.4 and 6.95 billion
    small, large = KNOWN["Qwen/Qwen3-1.7B-Base"], KNOWN["Qwen/Qwen3-8B-Base"]
    assert small.num_parameters == pytest.approx(1.72e9, rel=0.01)
    assert large.num_parameters == pytest.approx(8.2e9, rel=0.01)
    assert small.num_parameters - small.embedding_parameters == pytest.approx(1.4e9, rel=0.01)
    assert large.num_parameters - 2 * large.embedding_parameters == pytest.approx(6.95e9, rel=0.01)


def test_the_shipped_model_is_found_with_its_tokenizer():
    embedded = find_architecture("embedded")
    assert 90_000 < embedded.num_parameters < 110_000
    assert model_file("embedded", "tokenizer.json", download=False).name == "tokenizer.json"
    assert find_architecture("smollm2").num_parameters == 134_515_008  # counted by transformers in its weights


def test_a_model_that_is_not_here_or_of_another_kind_is_unknown(tmp_path):
    assert find_architecture("nobody/nothing") is None  # tests have no hub
    assert model_file("nobody/nothing", "tokenizer.json", download=False) is None
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert find_architecture(str(tmp_path)) is None
    assert Architecture.from_config({"model_type": "gpt2"}) is None


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"has no config.json, so it is not a model"):
        find_architecture(str(tmp_path))
    with pytest.raises(UserError, match=r"no such folder"):
        find_architecture(str(tmp_path / "none"))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(UserError, match=r"config.json does not describe a model: KeyError"):
        find_architecture(str(tmp_path))
