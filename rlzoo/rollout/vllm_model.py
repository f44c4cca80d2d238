"""A model as vLLM reads it: names, tied embeddings, and heads of a size that its CPU kernels know."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn.functional import pad

from rlzoo.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # what vLLM 0.32's attention on the CPU knows

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def head_size(config: PretrainedConfig) -> int:
    """Width of one attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def cpu_head_size(config: PretrainedConfig) -> int:
    """The smallest head that vLLM's CPU kernels know and that holds the model's.

    Raises:
        UserError: there is none, or the model's heads cannot be padded.
    """
    own = head_size(config)
    size = min((size for size in CPU_HEAD_SIZES if size >= own), default=None)
    if size is None or (size != own and config.model_type != "qwen3"):
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        raise UserError(f"rollout.engine='vllm': on the CPU it needs heads of {sizes}, not {own}; use rollout.engine=hf")
    return size


def padded_config(config: PretrainedConfig, size: int) -> PretrainedConfig:
    """The same model with heads of ``size``, see `padded`: positions still turn the first components alone."""
    changed = copy.deepcopy(config)
    changed.head_dim = size
    changed.rope_parameters = {**config.rope_parameters, "partial_rotary_factor": head_size(config) / size}
    return changed


def vllm_weights(weights: Iterable[tuple[str, Tensor]], config: PretrainedConfig, size: int) -> Iterator[tuple[str, Tensor]]:
    """A model's ``state_dict`` as vLLM has to be given it, tensor by tensor.

    vLLM keeps a head of its own for tied embeddings and does not say so when it is left as it was: it is always given.

    Args:
        weights: names and tensors of transformers' model.
        config: that model's.
        size: width of a head in vLLM; the model's own, or larger.
    """
    own, embeddings, has_head = head_size(config), None, False
    for name, tensor in weights:
        has_head |= name == HEAD
        embeddings = tensor if name == EMBEDDINGS else embeddings
        yield name, tensor if size == own else padded(name, tensor, own, size)
    if not has_head and config.tie_word_embeddings:
        assert embeddings is not None, f"no {EMBEDDINGS} among the weights"
        yield HEAD, embeddings


def padded(name: str, tensor: Tensor, own: int, size: int) -> Tensor:
    """A Qwen3 tensor for heads of ``size``: zeros behind each head's components, which leaves every logit as it was.

    The mean square that normalises queries and keys is then over ``size`` components, which makes both larger by
    sqrt(size / own); and scores are divided by sqrt(size) instead of sqrt(own). So keys are made smaller by
    sqrt(own / size), and in the queries the two cancel.
    """
    _, _, inner = name.partition(".self_attn.")
    room = size - own
    match inner.split(".")[0]:
        case "q_norm":
            return pad(tensor, (0, room))
        case "k_norm":
            return pad(tensor * (own / size) ** 0.5, (0, room))
        case "q_proj" | "k_proj" | "v_proj":
            heads = tensor.reshape(-1, own, *tensor.shape[1:])
            return pad(heads, (0, 0) * (tensor.dim() - 1) + (0, room)).reshape(-1, *tensor.shape[1:])
        case "o_proj" if inner.endswith("weight"):
            return pad(tensor.reshape(len(tensor), -1, own), (0, room)).reshape(len(tensor), -1)
    return tensor


def write_served(path: str, folder: str | Path) -> None:
    """Write a model, by any name that ``model.path`` takes, as a folder for ``vllm serve`` on this machine.

    Args:
        path: as in ``model.path``.
        folder: where to; it must not exist.
    """
    from safetensors.torch import save_file
    from vllm.platforms import current_platform

    from rlzoo.models.pretrained import load_pretrained

    model, tokenizer = load_pretrained(path, "float32")
    size = cpu_head_size(model.config) if current_platform.is_cpu() else head_size(model.config)
    Path(folder).mkdir(parents=True)
    config = model.config if size == head_size(model.config) else padded_config(model.config, size)
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tensors = {name: tensor.clone() for name, tensor in vllm_weights(model.state_dict().items(), model.config, size)}
    save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
