"""Writes tiny models to GGUF files as llama.cpp's converter would, byte by byte for quantised weights."""

import re

import numpy as np
import pytest
import torch
import transformers

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


LAYER_NORM = {"attention.layer_norm_epsilon": 1e-5, "attention.layer_norm_rms_epsilon": None}
HEADS = {"attention.key_length": 8, "attention.value_length": 8}
KINDS = {
    "llama": ("Llama", {}, {}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}, {}),
    "qwen3": ("Qwen3", {"head_dim": 128}, {"attention.key_length": 128, "attention.value_length": 128}),
    "qwen3moe": (
        "Qwen3Moe",
        {"head_dim": 8, "moe_intermediate_size": 768, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True},
        {**HEADS, "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 768},
    ),
    "gemma2": (
        "Gemma2",
        {"tie_word_embeddings": True, "head_dim": 8, "sliding_window": 8},
        {**HEADS, "attention.sliding_window": 8, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": (
        "Gemma3",
        {"tie_word_embeddings": True, "head_dim": 8, "sliding_window": 8, "rope_parameters": None, "num_hidden_layers": 6},
        {**HEADS, "attention.sliding_window": 8, "rope.freq_base": 1e6},
    ),
    "gpt2": (
        "GPT2",
        {"max_position_embeddings": 1024, "tie_word_embeddings": True},
        {**LAYER_NORM, "attention.head_count_kv": None, "rope.freq_base": None},
    ),
    "lfm2": (
        "Lfm2",
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "norm_eps": 1e-5},
        {"shortconv.l_cache": 3, "attention.head_count_kv": [0, 2]},
    ),
    "starcoder2": ("Starcoder2", {"rope_parameters": None, "norm_epsilon": 1e-5}, LAYER_NORM),
    "stablelm": (
        "StableLm",
        {"rope_parameters": None, "layer_norm_eps": 1e-5},
        {**LAYER_NORM, "rope.dimension_count": 2, "use_parallel_residual": False},
    ),
}
"""Architectures: the name of transformers' classes, other settings, and other keys."""


def random_model(architecture="llama", **settings):
    """A model with weights so large that every layer changes its logits."""
    name, special, _ = KINDS[architecture]
    config = getattr(transformers, f"{name}TextConfig" if architecture == "gemma3" else f"{name}Config")
    kind = getattr(transformers, f"{name}LMHeadModel" if architecture == "gpt2" else f"{name}ForCausalLM")
    given = {"tie_word_embeddings": False, **SIZES, **special, **settings}
    model, generator = kind(config(**given)).eval(), torch.Generator().manual_seed(0)
    if architecture == "qwen3moe":
        model.set_experts_implementation("eager")  # the others cannot compute in float64
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3 + (parameter.ndim == 1)
    return model


def quantised(weights, kind):
    """The bytes of a matrix in blocks of 32 weights, and the values that they mean.

    A block has a scale in float16, in Q5_1 an offset, and 32 whole numbers: bytes, or five bits each in Q5_0 and Q5_1. Then
    four bytes hold the highest bits, and 16 bytes hold the others, those of the second half in the upper half of each byte.
    """
    blocks = weights.reshape(-1, 32).astype(np.float64)
    most = 127 if kind == "Q8_0" else 15
    offsets = blocks.min(1, keepdims=True).astype(np.float16) if kind == "Q5_1" else np.zeros((len(blocks), 0), np.float16)
    scales = (np.ptp(blocks, 1, keepdims=True) / 31 if kind == "Q5_1" else np.abs(blocks).max(1, keepdims=True) / most).astype(
        "f2"
    )
    shift = offsets.astype(np.float64).sum(1, keepdims=True)
    low, high = (0, 31) if kind == "Q5_1" else (-most, most)
    numbers = np.round((blocks - shift) / scales).clip(low, high).astype(np.int8)
    parts = [scales.view(np.uint8), offsets.view(np.uint8), numbers.view(np.uint8)]
    if kind != "Q8_0":
        bits = (numbers + (16 if kind == "Q5_0" else 0)).astype(np.uint8)
        highest = np.packbits(bits >> 4, axis=1, bitorder="little")
        parts[2] = np.concatenate([highest, bits[:, :16] & 15 | (bits[:, 16:] & 15) << 4], axis=1)
    data = np.concatenate(parts, axis=1).reshape(len(weights), -1)
    return data, (scales.astype(np.float64) * numbers + shift).reshape(weights.shape)


def write_gguf(file, model=None, *, quantisation=None, pre="gpt-2", keys=(), tensors=(), without=(), tokenizer=None):
    """Write a model to a file, and set its weights, in float64, to what the file means.

    Args:
        file: the file to write.
        model: a model of `random_model`.
        quantisation: type of the matrices: Q8_0, Q5_0 or Q5_1; None for F32.
        pre: ``tokenizer.ggml.pre``.
        keys: more metadata, as pairs of a key and a value; ``None`` removes the tokenizer's key.
        tensors: more tensors, as pairs of a name and an array.
        without: names of tensors that are left out.
        tokenizer: a function that writes another tokenizer.
    """
    model = model or random_model()
    config = model.config
    architecture = config.model_type.removesuffix("_text").replace("_", "")
    stated = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", 4 * config.hidden_size),
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", config.num_attention_heads),
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", getattr(config, "norm_eps", None)),
        "rope.freq_base": (getattr(config, "rope_parameters", None) or {}).get("rope_theta"),
        **KINDS[architecture][2],
    }
    stated = {f"{architecture}.{key}": value for key, value in stated.items() if value is not None} | dict(keys)
    writer = gguf.GGUFWriter(file, stated.pop("general.architecture", architecture))
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in stated.items():
        add[type(value)](key, value)
    (tokenizer or byte_tokenizer)(writer, pre)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    model.double()
    for name, parameter in model.named_parameters() if architecture not in ("llama", "qwen2") else ():
        for stored, weights in other_layout(name, parameter.data, names, architecture):
            writer.add_tensor(stored, weights.float().contiguous().numpy())
        parameter.data = parameter.data.float().double()
    for name, parameter in model.named_parameters() if architecture in ("llama", "qwen2") else ():
        place, _, kind = name.rpartition(".")
        if (stored := f"{names.get_name(place)}.{kind}") in without:
            continue
        weights = interleaved(parameter.data, name, config).float().numpy()
        if quantisation and weights.ndim == 2:
            data, meant = quantised(weights, quantisation)
            writer.add_tensor(stored, data, raw_dtype=gguf.GGMLQuantizationType[quantisation])
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


def other_layout(name, weights, names, architecture):
    """Yield the tensors of an architecture other than Llama and Qwen2, and their names in the file."""
    place, _, kind = name.rpartition(".")
    if "mlp.experts." in name:
        block, halves = f"blk.{name.split('.')[2]}.ffn_", weights.chunk(2, dim=1)
        whole = {"down": weights} if kind == "down_proj" else dict(zip(("gate", "up"), halves, strict=True))
        yield from ((f"{block}{part}_exps.weight", tensor) for part, tensor in whole.items())
        return
    if architecture.startswith("gemma") and "norm" in name:
        weights = weights + 1  # as the model adds it
    if architecture == "gpt2" and ("attn" in name or "mlp" in name) and weights.ndim == 2:
        weights = weights.T
    yield f"{names.get_name(place)}.{kind}", weights.squeeze(1) if name.endswith("conv.conv.weight") else weights


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
