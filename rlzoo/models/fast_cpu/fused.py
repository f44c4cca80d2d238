"""Runs a decoding step of a Llama-like model with joined matrices and one operation for all heads, bypassing its modules.

Most of the cost of a step in a small model is the overhead of many small operations. This module needs only a third as many
operations. It computes the same results as the Llama, Mistral, Qwen2 and Qwen3 models in transformers and is compared with
them before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlzoo.models.fast_cpu.cpu import OneDnnLinear, Product

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import DynamicLayer

MODELS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPES = ("default", "linear", "llama3", "yarn")  # rotary types whose angles do not depend on the response's length
JOINED_BYTES = 2**30
"""Maximum total size, in bytes, of layers whose matrices are joined and packed, which requires copies of the matrices."""


@dataclass(frozen=True, slots=True)
class Block:
    """One layer's weights."""

    norm: Tensor
    inputs: tuple[Product, ...]  # query, key and value, joined if the model is small enough
    head_norm: Tensor | None  # (heads + key heads, D)
    output: Product
    mlp_norm: Tensor
    mlp_inputs: tuple[Product, ...]  # gate and up, joined if the model is small enough
    mlp_output: Product


class FusedStep:
    """Computes the next token's logits from the weights as they were at construction."""

    def __init__(self, model: PreTrainedModel, length: int) -> None:
        decoder, config = model.base_model, model.config
        autocast = torch.is_autocast_enabled(model.device.type)
        self.dtype = torch.get_autocast_dtype(model.device.type) if autocast else model.dtype
        attention = decoder.layers[0].self_attn
        self.size = int(attention.head_dim)
        self.num_heads = attention.q_proj.out_features // self.size
        self.num_key_heads = attention.k_proj.out_features // self.size
        self.scale = float(attention.scaling)
        self.eps = float(config.rms_norm_eps)
        self.least = torch.tensor(self.eps**0.5)  # the root mean square of zeros after eps is added
        self.act: Callable[[Tensor], Tensor] = decoder.layers[0].mlp.act_fn
        self.embedding: Tensor = decoder.embed_tokens.weight
        self.norm: Tensor = decoder.norm.weight
        self.copies = sum(parameter.nbytes for parameter in decoder.layers.parameters()) <= JOINED_BYTES
        self.head = self._product(model.get_output_embeddings())
        self.blocks = [self._block(layer) for layer in decoder.layers]
        positions = torch.arange(length, device=model.device)[None]
        cos, sin = decoder.rotary_emb(torch.zeros(1, 1, dtype=torch.float32, device=model.device), positions)
        self.cos, self.sin = cos[0, :, None], sin[0, :, None].clone()  # (length, 1, D)
        self.sin[..., : self.size // 2] *= -1  # so that the rotation of a pair needs only one roll

    def _block(self, layer: Any) -> Block:
        attention, mlp = layer.self_attn, layer.mlp
        head_norm = None
        if hasattr(attention, "q_norm"):
            norms = ((attention.q_norm.weight, self.num_heads), (attention.k_norm.weight, self.num_key_heads))
            head_norm = torch.cat([weight.expand(number, -1) for weight, number in norms])
        return Block(
            norm=layer.input_layernorm.weight,
            inputs=self._products((attention.q_proj, attention.k_proj, attention.v_proj)),
            head_norm=head_norm,
            output=self._product(attention.o_proj),
            mlp_norm=layer.post_attention_layernorm.weight,
            mlp_inputs=self._products((mlp.gate_proj, mlp.up_proj)),
            mlp_output=self._product(mlp.down_proj),
        )

    def _product(self, *linears: nn.Linear) -> Product:
        """Return one product that computes several linear layers and concatenates their outputs."""
        weights = [linear.weight.to(self.dtype) for linear in linears]
        biases = [linear.bias.to(self.dtype) for linear in linears if linear.bias is not None]
        bias = torch.cat(biases) if biases else None
        return Product(weights[0] if len(weights) == 1 else torch.cat(weights), bias, packs=self.copies)

    def _products(self, linears: Sequence[nn.Linear]) -> tuple[Product, ...]:
        return (self._product(*linears),) if self.copies else tuple(map(self._product, linears))

    def __call__(self, tokens: Tensor, positions: Tensor, layers: Sequence[DynamicLayer], mask: Tensor | None) -> Tensor:
        """Return the logits ``(B, V)`` after one more token of each response.

        Args:
            tokens: ``(B,)``.
            positions: ``(B,)`` positions of these tokens, counted from 0.
            layers: the caches, to which the keys and values of the tokens are appended.
            mask: bool ``(B, 1, 1, T)``, True where attention is allowed, including the new token; None allows it everywhere. A
                floating-point mask is added to the scores.
        """
        with torch.autocast(tokens.device.type, enabled=False):
            cos, sin = self.cos[positions], self.sin[positions]
            hidden = functional.embedding(tokens, self.embedding)
            for block, cache in zip(self.blocks, layers, strict=True):
                hidden = hidden + self._attend(block, self._normed(hidden, block.norm), cos, sin, cache, mask)
                states = _times(self._normed(hidden, block.mlp_norm), block.mlp_inputs)
                gate, up = states.chunk(2, dim=-1)
                hidden = hidden + block.mlp_output(self.act(gate) * up)
            return self.head(self._normed(hidden, self.norm))

    def _normed(self, states: Tensor, weight: Tensor) -> Tensor:
        """Compute RMSNorm over the last dimension, with fewer operations on a CPU than torch's own function."""
        if states.device.type != "cpu":
            plain = weight.dim() == 1  # otherwise, there is one weight per head
            normed = functional.rms_norm(states, states.shape[-1:], weight if plain else None, self.eps)
            return (normed if plain else normed * weight).to(self.dtype)
        length = torch.linalg.vector_norm(states, dim=-1, keepdim=True, dtype=torch.float32)
        root_mean_square = length.div_(states.shape[-1] ** 0.5).hypot_(self.least)
        result: Tensor = (states / root_mean_square).mul_(weight).to(self.dtype)
        return result

    def _attend(
        self, block: Block, states: Tensor, cos: Tensor, sin: Tensor, cache: DynamicLayer, mask: Tensor | None
    ) -> Tensor:
        heads, keys = self.num_heads, self.num_key_heads
        projected = _times(states, block.inputs).view(len(states), heads + 2 * keys, self.size)
        turned, value = projected[:, : heads + keys], projected[:, heads + keys :]
        if block.head_norm is not None:
            turned = self._normed(turned, block.head_norm)
        turned = torch.addcmul(turned * cos, turned.roll(self.size // 2, dims=-1), sin)
        all_keys, all_values = cache.update(turned[:, heads:, None], value[:, :, None])
        # treat queries that share a key as rows of one attention
        query = turned[:, :heads].reshape(len(states), keys, heads // keys, self.size).to(all_values.dtype)
        attended = functional.scaled_dot_product_attention(
            query, all_keys.to(all_values.dtype), all_values, mask, scale=self.scale
        )
        return block.output(attended.reshape(len(states), heads * self.size).to(self.dtype))


def _times(states: Tensor, matrices: tuple[Product, ...]) -> Tensor:
    products = [matrix(states) for matrix in matrices]
    return products[0] if len(products) == 1 else torch.cat(products, dim=-1)


def can_fuse(model: PreTrainedModel) -> bool:
    """Return whether `FusedStep` supports the model, which needs fixed rotary angles and linear layers without hooks."""
    if type(model).__name__ not in MODELS:
        return False
    rope = getattr(model.config, "rope_parameters", None) or {}
    linears = [module for name, module in model.named_modules() if name.endswith(("_proj", "lm_head"))]
    plain = (type(module) in (nn.Linear, OneDnnLinear) and not module._forward_hooks for module in linears)
    return rope.get("rope_type", "default") in ROPES and all(plain)
