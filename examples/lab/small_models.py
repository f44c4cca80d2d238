"""Builds a small random causal language model of every type in transformers from that type's default configuration."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

VOCABULARY = 128
LAYERS = 4
SIZES = {
    r"original_max_position_embeddings": 64,
    r".*vocab(_size.*)?": VOCABULARY,
    r"max_(position_embeddings|seq(uence)?_len(gth)?|(source|target)_positions)": 256,
    r"n_(positions|ctx)|context_length|model_max_length": 256,
    r"num_experts_per_tok(en)?|moe_top_?k|moe_k|.*(period|interval|sliding_window_pattern|every_n_layers)": 2,
    r"(num_|n_)?(hidden_|encoder_|decoder_)?layers?|num_blocks|depth": LAYERS,
    r"(num_|n_)?(moe_num_|local_|routed_)?experts|zero_expert_num": 4,
    r"qk_head_dim|mamba_(d_head|head_?dim)|index_n_heads": 16,  # fewer index heads would often choose between equal scores
    r"(.*_)?head_(dim|size)|rotary_dim|kv_channels|d_kv|dim_head|d_head": 8,
    r"(.*_)?(kv_|key_value_)heads|kv_n_heads|(mamba_)?n_groups|mamba_ngroups|o_groups": 2,
    r"(.*_)?heads?|num_query_groups": 4,
    r"(attention_|backbone_)?hidden_size(_.*)?|d_model|n_embd|emb(edding)?_dim|embedding_size|.*put_(embedding_)?size": 32,
    r"word_embed_proj_dim|lru_width": 32,
    r".*(intermediate|ffn|feed_forward|inner|mlp).*|dim_ff|dff|d_ff|d_inner|mamba_d_ssm": 64,
    r".*rank|d_rel|router_hidden_size": 16,
    r"(mamba_|ssm_)?(d_state|state_size)": 8,
    r".*window(_size|_len)?|.*chunk_(size|length)|(index_)?block_size|local_attention|index_topk|rel_extent": 16,
    r"max_window_layers|first_k_dense_replace|.*num_dense_layers|num_kv_shared_layers|moe_layer_start_index": 1,
    r"(n|topk|num_expert)_group": 1,
}
"""Sizes of the small models by patterns for their names in a configuration. The first pattern that matches applies."""

ROTARY = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
INDEXER = {"n_heads": 16, "kv_heads": 1, "head_dim": 8, "budget": 16, "compress_ratio": 4}
HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 2}
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": HYBRID,
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROTARY, "sliding_attention": ROTARY}},
    "dbrx": {"attn_config.rope_theta": 1e4, "attn_config.clip_qkv": 8.0},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {
        "text_config.head_dim": 16,
        "vision_config.adapter_in_dim": 32,
        "vision_config.adapter_out_dim": 32,
        "audio_config.adapter_out_dim": 32,
    },
    "dots3_note_text": {"head_dim": 16},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "jamba": {"attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"head_dim": 16},
    "qwen4_exp": {f"text_config.indexer_{name}": value for name, value in INDEXER.items()},
    "qwen4_exp_text": {f"indexer_{name}": value for name, value in INDEXER.items()},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},  # the total size of its heads is rounded up to a multiple of 64
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16},
    "zamba2": {"attention_hidden_size": 64, "attention_head_dim": 16, "hybrid_layer_ids": [1, 3]},
}
"""Values for which the patterns are wrong, by type. Names with a dot are those of a nested configuration."""


def shrunk(config: Mapping[str, Any], special: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with small sizes. A list with one entry per layer keeps one entry of every kind."""
    depth = next((config[name] for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") if config.get(name)), 0)
    lists = {name: values for name, values in config.items() if isinstance(values, list | tuple) and 1 < len(values) == depth}
    by_layer = {int(layer): values for layer, values in (config.get("per_layer_config") or {}).items()}
    kinds: dict[str, int] = {}
    for layer in range(depth):
        kinds.setdefault(repr([[values[layer] for values in lists.values()], by_layer.get(layer)]), layer)
    layers = [list(kinds.values())[number % min(len(kinds), LAYERS)] for number in range(LAYERS)] if kinds else []
    small: dict[str, Any] = {}
    for name, value in config.items():
        nested = {key.partition(".")[2]: entry for key, entry in special.items() if key.startswith(f"{name}.")}
        if name == "per_layer_config" and by_layer:
            chosen = {number: by_layer[layer] for number, layer in enumerate(layers) if layer in by_layer}
            small[name] = {f"{number:02d}": shrunk(values, {}) for number, values in chosen.items()}
        elif name in lists:
            small[name] = [_small(name, lists[name][layer]) for layer in layers]
        elif isinstance(value, Mapping) and name not in ("id2label", "label2id"):
            small[name] = shrunk(value, nested)
        else:
            small[name] = _small(name, 99 if value is None and name in ("head_dim", "num_key_value_heads") else value)
    if config.get("num_key_value_heads") == config.get("num_attention_heads") is not None:
        small["num_key_value_heads"] = small["num_attention_heads"]
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1} if "vocab_size" in config else {}
    return small | ids | {name: value for name, value in special.items() if "." not in name}


def _small(name: str, value: Any) -> Any:
    if name in ("initializer_range", "init_std"):
        return 0.2
    if type(value) is not int or value <= 1 or name.endswith(("token_id", "token_index")):
        return value
    return next((size for pattern, size in SIZES.items() if re.fullmatch(pattern, name)), value)


def build(kind: str, folder: Path) -> None:
    """Save a small random model of a type, with a single-character tokenizer that has no begin token."""
    torch.manual_seed(0)
    known = CONFIG_MAPPING[kind]
    settings = shrunk(known().to_dict(), SPECIAL.get(kind, {}))
    for name in ("architectures", "dtype", "transformers_version", "model_type"):
        settings.pop(name, None)
    config = known.from_dict(settings)
    with torch.device("meta"):
        sizes = {name: weight.numel() for name, weight in AutoModelForCausalLM.from_config(config).named_parameters()}
    if sum(sizes.values()) > 2**23:
        raise ValueError(f"{sum(sizes.values())} weights; the largest is {max(sizes, key=sizes.__getitem__)}")
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            _enlarge(weight)
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    model.save_pretrained(folder)
    words = ["<pad>", "<eos>", "<unk>", *string.printable[:95], *map(chr, range(0xC0, 0x100))][:VOCABULARY]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def _enlarge(weight: Tensor) -> None:
    """Make the weights large and varied enough that a wrong position or mask changes the log-probs."""
    spread = float(weight.std()) if weight.is_floating_point() and weight.numel() > 1 else 1.0
    if weight.dim() >= 2 and 0 < spread < 0.2:
        weight.mul_(0.2 / spread)
    elif spread == 0:
        weight.add_(0.2 * torch.randn_like(weight))
    if weight.dim() == 2:
        empty = (weight == 0).all(dim=1)  # the row of the padding token
        weight[empty] = 0.2 * torch.randn_like(weight[empty])
