"""Models of a few thousand parameters and their tokenizer, made on demand, and the error for a bad model."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging as transformers_logging

from rlzoo.core.errors import UserError
from rlzoo.models.pretrained import load_pretrained

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = ["<end>", "<pad>", *ALPHABET]
SIZES = {
    "vocab_size": len(TOKENS),
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
IDS = torch.tensor([[5, 6, 7, 8]])


def tiny_llama(**settings):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "eos_token_id": 0, "tie_word_embeddings": True, **settings}))


def tiny_qwen3():
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, eos_token_id=[0, 3], tie_word_embeddings=False))


def tiny_tokenizer(**special):
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(TOKENS)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **(special or {"eos_token": "<end>"}))


def save(folder, model=None, tokenizer=None):
    transformers_logging.disable_progress_bar()
    (model or tiny_llama()).save_pretrained(folder)
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    transformers_logging.enable_progress_bar()
    return folder


def refuses(path, *parts):
    with pytest.raises(UserError) as caught:
        load_pretrained(str(path))
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message
    return message
