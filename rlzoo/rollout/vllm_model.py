"""Converts models for vLLM by untying embeddings and padding attention heads to a size that its CPU kernels support."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn.functional import pad

from rlzoo.core.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # sizes that vLLM 0.32's CPU attention supports

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def head_size(config: PretrainedConfig) -> int:
    """Return the width of one attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def cpu_head_size(config: PretrainedConfig) -> int:
    """Return the smallest head size that vLLM's CPU kernels support and that fits the model's heads.

    Raises:
        UserError: there is no such size, or the model's heads cannot be padded.
    """
    width = head_size(config)
    size = min((size for size in CPU_HEAD_SIZES if size >= width), default=None)
    if size is None or (size != width and config.model_type != "qwen3"):
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        raise UserError(
            f"rollout.engine='vllm': vLLM supports head sizes {sizes} on the CPU, not {width}; use rollout.engine=hf"
        )
    return size


def padded_config(config: PretrainedConfig, size: int) -> PretrainedConfig:
    """Return a config with heads of width ``size``. Rotary embeddings apply only to the original components."""
    if size == head_size(config):
        return config
    changed = copy.deepcopy(config)
    changed.head_dim = size
    changed.rope_parameters = {**config.rope_parameters, "partial_rotary_factor": head_size(config) / size}
    return changed


def vllm_weights(weights: Iterable[tuple[str, Tensor]], config: PretrainedConfig, size: int) -> Iterator[tuple[str, Tensor]]:
    """Convert a model's ``state_dict`` for vLLM, tensor by tensor.

    vLLM keeps a separate output head even if embeddings are tied and does not report a missing head, so the head is always
    included.

    Args:
        weights: names and tensors of the transformers model.
        config: config of that model.
        size: width of an attention head in vLLM, which is at least the width in the model.
    """
    width, embeddings, has_head = head_size(config), None, False
    for name, tensor in weights:
        has_head |= name == HEAD
        embeddings = tensor if name == EMBEDDINGS else embeddings
        yield name, tensor if size == width else padded(name, tensor, width, size)
    if not has_head and config.tie_word_embeddings:
        assert embeddings is not None, f"no {EMBEDDINGS} among the weights"
        yield HEAD, embeddings


def padded(name: str, tensor: Tensor, width: int, size: int) -> Tensor:
    """Pad the heads in a Qwen3 tensor with zeros from width ``width`` to width ``size``, without changing any logit.

    The mean square that normalises queries and keys is then taken over ``size`` components, which scales both by
    sqrt(size / width). Scores are divided by sqrt(size) instead of sqrt(width), which cancels the scale of the queries. The
    scale of the keys is cancelled by multiplying them by sqrt(width / size).
    """
    _, _, inner = name.partition(".self_attn.")
    room = size - width
    match inner.split(".")[0]:
        case "q_norm":
            return pad(tensor, (0, room))
        case "k_norm":
            return pad(tensor * (width / size) ** 0.5, (0, room))
        case "q_proj" | "k_proj" | "v_proj":
            heads = tensor.reshape(-1, width, *tensor.shape[1:])
            return pad(heads, (0, 0) * (tensor.dim() - 1) + (0, room)).reshape(-1, *tensor.shape[1:])
        case "o_proj" if inner.endswith("weight"):
            return pad(tensor.reshape(len(tensor), -1, width), (0, room)).reshape(len(tensor), -1)
    return tensor
