"""Models whose responses have known lengths in any library, because the model itself decides whether and when they end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import Qwen3Config

HIDDEN, LAYERS, INNER, HEADS, KEY_HEADS, HEAD_SIZE = 256, 6, 768, 8, 4, 32
LONGEST = 1200  # number of counters; if a prompt's last counter is far above the length limit, the response reaches this limit
SPECIAL = 2  # number of special tokens: padding and end


def qwen3(shape: tuple[int, int, int, int, int, int, int], **settings: Any) -> Qwen3Config:
    """Return the configuration of a Qwen3 model. ``shape`` is ordered as in `SHAPES`, and token 0 is the padding token."""
    from transformers import Qwen3Config

    vocabulary, hidden, inner, layers, heads, key_heads, head_size = shape
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=head_size,
        pad_token_id=0,
        bos_token_id=None,
        **settings,
    )


def countdown(folder: Path) -> Path:
    """Create a 5-million-parameter Qwen3 model that counts down from the prompt's last token and then ends.

    After "c32", for example, it writes 32 tokens. Each count can be written as either of two tokens with equal probability, so
    that sampling is not trivial. The embeddings and the head do the counting. The layers between them are computed as usual
    but contribute little.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

    if (folder / "config.json").exists():
        return folder
    words = {"<pad>": 0, "<end>": 1} | {
        f"{kind}{n}": SPECIAL + 2 * n + i for n in range(LONGEST) for i, kind in enumerate("cd")
    }
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    torch.manual_seed(0)
    shape = (len(words), HIDDEN, INNER, LAYERS, HEADS, KEY_HEADS, HEAD_SIZE)
    model = Qwen3ForCausalLM(qwen3(shape, max_position_embeddings=2048, tie_word_embeddings=False, eos_token_id=1))
    with torch.no_grad():
        embedding = torch.randn(len(words), HIDDEN)
        head = torch.zeros(len(words), HIDDEN)
        for count in range(1, LONGEST):
            seen = embedding[SPECIAL + 2 * count] + embedding[SPECIAL + 2 * count + 1]
            after = [1] if count == 1 else [SPECIAL + 2 * (count - 1), SPECIAL + 2 * (count - 1) + 1]
            head[after] = 40 / HIDDEN * seen
        model.get_input_embeddings().weight.copy_(embedding)
        model.get_output_embeddings().weight.copy_(head)
        for layer in model.model.layers:
            for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
                weight.mul_(0.1)
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<pad>").save_pretrained(folder)
    return folder


SHAPES = {
    "qwen3-1.7b": (151_936, 2048, 6144, 28, 16, 8, 128),
    "qwen3-0.6b": (151_936, 1024, 3072, 28, 16, 8, 128),
    "tiny": (1024, 64, 128, 2, 4, 2, 16),
}
"""Shapes of Qwen3 models with tied embeddings: vocabulary, width, MLP width, layers, heads, key-value heads, head size."""


def random_qwen3(name: str, folder: Path) -> Path:
    """Create a Qwen3 model with one of `SHAPES`, random bfloat16 weights and no end token. Its words are t0, t1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

    if (folder / "config.json").exists():
        return folder
    vocabulary = SHAPES[name][0]
    inner = Tokenizer(models.WordLevel({f"t{number}": number for number in range(vocabulary)}, unk_token="t0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="t0", eos_token="<never>")
    assert tokenizer.eos_token_id >= vocabulary
    config = qwen3(
        SHAPES[name],
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def endless(name: str, folder: Path) -> Path:
    """Copy a model but move its end token outside the vocabulary, so that every response reaches the length limit."""
    from rlzoo.models.pretrained import load_pretrained

    if (folder / "config.json").exists():
        return folder
    model, tokenizer = load_pretrained(name)
    tokenizer.add_special_tokens({"eos_token": "<never>", "pad_token": tokenizer.pad_token})
    assert tokenizer.eos_token_id >= model.config.vocab_size
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
