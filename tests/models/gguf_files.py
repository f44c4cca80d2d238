"""Writes tiny models to GGUF files as llama.cpp's converter would, byte by byte for quantised weights."""

import re

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from tests.models.tiny import ALPHABET

gguf = pytest.importorskip("gguf")

WORDS = ["12", "123", "hello", "ĠĠ"]  # the third is no result of the merges
TOKENS = ["<end>", "<pad>", *ALPHABET, *WORDS]
MERGES = ["1 2", "12 3", "Ġ Ġ"]
SIZES = {
    "vocab_size": len(TOKENS),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}


def random_model(architecture="llama", **settings):
    """A model with weights so large that every layer changes its logits."""
    kinds = {"llama": (LlamaForCausalLM, LlamaConfig), "qwen2": (Qwen2ForCausalLM, Qwen2Config)}
    (kind, config), generator = kinds[architecture], torch.Generator().manual_seed(0)
    model = kind(config(**{**SIZES, "tie_word_embeddings": architecture == "qwen2", **settings})).eval()
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3 + (parameter.ndim == 1)
    return model


def q8_0(weights):
    """The bytes of a matrix in blocks of 32 weights: a scale in float16 and 32 whole numbers; and the values that they mean."""
    blocks = weights.reshape(-1, 32).astype(np.float64)
    scales = (np.abs(blocks).max(1, keepdims=True) / 127).astype(np.float16)
    numbers = np.round(blocks / scales).clip(-127, 127).astype(np.int8)
    data = np.concatenate([scales.view(np.uint8), numbers.view(np.uint8)], axis=1).reshape(len(weights), -1)
    return data, (scales.astype(np.float64) * numbers).reshape(weights.shape)


def write_gguf(file, model=None, *, is_quantised=False, pre="gpt-2", keys=(), tensors=(), without=(), tokenizer=None):
    """Write a model to a file, and set its weights, in float64, to what the file means.

    Args:
        file: the file to write.
        model: a model of `random_model`.
        is_quantised: whether matrices are written as Q8_0 instead of F32.
        pre: ``tokenizer.ggml.pre``.
        keys: more metadata, as pairs of a key and a value; ``None`` removes the tokenizer's key.
        tensors: more tensors, as pairs of a name and an array.
        without: names of tensors that are left out.
        tokenizer: a function that writes another tokenizer.
    """
    model = model or random_model()
    config, architecture = model.config, model.config.model_type
    writer = gguf.GGUFWriter(file, dict(keys).get("general.architecture", architecture))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for key, value in dict(keys).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        if key != "general.architecture":
            add(key, value)
    (tokenizer or byte_tokenizer)(writer, pre)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    model.double()
    for name, parameter in model.named_parameters():
        place, _, kind = name.rpartition(".")
        if (stored := f"{names.get_name(place)}.{kind}") in without:
            continue
        weights = interleaved(parameter.data, name, config).float().numpy()
        if is_quantised and weights.ndim == 2:
            data, meant = q8_0(weights)
            writer.add_tensor(stored, data, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            parameter.data = interleaved(torch.from_numpy(meant), name, config, is_inverse=True)
        else:
            writer.add_tensor(stored, weights)
            parameter.data = parameter.data.float().double()
    for name, array in dict(tensors).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def byte_tokenizer(writer, pre, tokens=TOKENS):
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * (len(tokens) - 2)])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(1)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")


def interleaved(weights, name, config, *, is_inverse=False):
    """The rows of Llama's queries and keys in the order of llama.cpp, which rotates neighbours instead of halves."""
    kind = re.search(r"\.([qk])_proj\.", name)
    if not kind or config.model_type != "llama":
        return weights
    heads = config.num_attention_heads if kind[1] == "q" else config.num_key_value_heads
    split = (-1, 2) if is_inverse else (2, -1)
    return weights.reshape(heads, *split, *weights.shape[1:]).transpose(1, 2).reshape(weights.shape)
