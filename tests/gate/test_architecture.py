"""The shape of a model: its number of parameters matches the real model, and it is found without weights."""

import json
import logging

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlzoo import RunConfig, UserError
from rlzoo.gate.architecture import find_architecture, model_file, saved_by
from tests.rules import few

SIZES = {
    "vocab_size": 101,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 7,  # Gemma's sixth layer is of another kind
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}


@pytest.mark.parametrize("tied", few([True, False]))
@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama", "gpt2", "gemma2", "gemma3_text", "mixtral"])
def test_the_meta_device_copy_counts_the_memory_of_a_real_model(tmp_path, kind, tied):
    config = AutoConfig.for_model(kind, **SIZES, tie_word_embeddings=tied)
    config.save_pretrained(tmp_path)
    architecture, model = (
        find_architecture(str(tmp_path)),
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval(),
    )
    layers = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    assert architecture.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert architecture.layer_parameters == sum(parameter.numel() for parameter in layers[0].parameters())
    assert (architecture.num_layers, architecture.max_length) == (7, 64)
    forward = architecture.forward(RunConfig(clip="grpo", model={"dtype": "bfloat16"}), 2, 8)
    with saved_by(model) as saved:
        output = model.get_decoder()(torch.zeros(2, 8, dtype=torch.long), use_cache=True)
    assert forward.saved == pytest.approx(sum(saved.values()), rel=0.02)
    assert forward.cache == sum(layer.keys.nbytes + layer.values.nbytes for layer in output.past_key_values.layers)


def test_paper_models_have_the_parameter_counts_of_their_model_cards():
    # model cards: 1.7 and 8.2 billion, without embeddings 1.4 and 6.95 billion
    small, large = (find_architecture(f"Qwen/Qwen3-{size}-Base") for size in ("1.7B", "8B"))
    assert small.num_parameters == pytest.approx(1.72e9, rel=0.01)
    assert large.num_parameters == pytest.approx(8.2e9, rel=0.01)
    assert small.num_parameters - small.embedding_parameters == pytest.approx(1.4e9, rel=0.01)
    assert large.num_parameters - 2 * large.embedding_parameters == pytest.approx(6.95e9, rel=0.01)


def test_the_shipped_model_is_found_with_its_tokenizer():
    embedded = find_architecture("embedded")
    assert 90_000 < embedded.num_parameters < 110_000
    assert model_file("embedded", "tokenizer.json", download=False).name == "tokenizer.json"
    assert find_architecture("smollm2").num_parameters == 134_515_008  # counted by transformers in its weights


def test_a_model_that_is_absent_or_has_custom_code_is_unknown(tmp_path):
    assert find_architecture("nobody/nothing") is None  # tests have no hub
    assert model_file("nobody/nothing", "tokenizer.json", download=False) is None
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "its_own"}))
    assert find_architecture(str(tmp_path)) is None


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"has no config.json, so it is not a model"):
        find_architecture(str(tmp_path))
    with pytest.raises(UserError, match=r"no such folder"):
        find_architecture(str(tmp_path / "none"))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "hidden_size": "wide"}')
    with pytest.raises(UserError, match=r"config.json does not describe a model: "):
        find_architecture(str(tmp_path))


def test_a_pass_that_cannot_be_computed_prints_nothing(tmp_path, monkeypatch):
    sizes = {"num_layers": 2, "hidden_size": 24, "num_heads": 6, "max_position_embeddings": 16, "vocab_size": 101}
    config = AutoConfig.for_model("gpt_neo", **sizes, attention_types=[[["global", "local"], 1]])
    config.save_pretrained(tmp_path)
    records = []
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "handlers", [handler := logging.Handler()])
    monkeypatch.setattr(handler, "emit", records.append)
    with pytest.raises(RuntimeError):
        find_architecture(str(tmp_path)).forward(RunConfig(clip="grpo", learner={"packing": True}), 4, 16)
    assert records == []
