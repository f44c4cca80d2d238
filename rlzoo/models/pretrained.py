"""Loads language models by name: embedded models, and models from a GGUF file, a folder or the hub."""

from __future__ import annotations

import importlib.resources
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlzoo.config.sections import ModelConfig
from rlzoo.core.errors import UserError, described, did_you_mean, shown
from rlzoo.models.gguf import convert, converted_folder, gguf_file, is_gguf

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger("rlzoo")

EMBEDDED = ("embedded", "embedded-guess")
"""Names of the models that ship with the package, and of their folders."""

ALLOWED = "'embedded', 'embedded-guess', 'smollm2', a GGUF file, a folder, or a hub name that is cached or can be downloaded"


# settings that limit the length of a row; if a configuration has several, the first of them in this order applies
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")
_POSITIONS = re.compile(r"wpe|(embed_)?positions?(_embeddings?|_embed)?")  # names of learned position embeddings


def local_model(path: str) -> Path | None:
    """Return the folder of a local model, or None for a GGUF file that has not been converted or a name on the hub.

    Raises:
        UserError: the folder does not exist or contains no model, or the name is unknown.
    """
    if path in EMBEDDED:
        return Path(str(importlib.resources.files("rlzoo.models"))) / "assets" / path
    if is_gguf(path):
        file = gguf_file(path)
        return folder if file and (folder := converted_folder(file)).is_dir() else None
    try:
        folder = Path(path).expanduser() if path.startswith("~/") else Path(path)
        exists = bool(path) and folder.exists()
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"model.path={shown(path)}: {error}") from error
    if exists:
        if not folder.is_dir():
            raise UserError(f"model.path={path!r}: {folder} is neither a folder nor a file whose name ends in .gguf")
        if not (folder / "config.json").is_file():
            saved = "; to use a run, name a checkpoint: checkpoints/step-NUMBER" * (folder / "checkpoints").is_dir()
            raise UserError(f"model.path={path!r}: {folder} has no config.json, so it is not a model{saved}")
        return folder
    if path.startswith((".", "/", "~")) or path.count("/") > 1 or path.endswith(("/", ".gguf")):
        raise UserError(f"model.path={path!r}: no such {'file' if path.endswith('.gguf') else 'folder'}")
    if "/" not in path:
        raise UserError(f"model.path={path!r}: no such model (allowed: {ALLOWED}){did_you_mean(path, [*EMBEDDED, 'smollm2'])}")
    return None


def load_pretrained(
    path: str, dtype: Literal["float32", "bfloat16"] = "float32", attn_implementation: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer by name; see `load_named` and `ModelConfig`."""
    return load_named(ModelConfig(path=path, dtype=dtype, attn_implementation=attn_implementation))


def load_named(settings: ModelConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model without dropout, and its tokenizer with left padding.

    Raises:
        UserError: the model does not exist or cannot be loaded.
    """
    path = settings.path
    folder = local_model(path)
    if folder is None and not is_gguf(path):
        logger.info("looking for %r in the Hugging Face cache and on the hub", path)
    trust_remote_code = settings.trust_remote_code and path not in EMBEDDED and not is_gguf(path)
    if trust_remote_code:
        logger.warning("model.trust_remote_code: the Python code in %r runs with all your permissions", path)
    try:
        with quiet():
            folder = convert(path) if is_gguf(path) else folder
            model, tokenizer, missing = _from_pretrained(str(folder or path), settings, trust_remote_code)
    except UserError:
        raise
    except Exception as error:  # the model's files can cause any exception
        what = f"{folder} contains no model that can be loaded" if folder else f"cannot be loaded (allowed: {ALLOWED})"
        attention = settings.attn_implementation
        how = "" if attention is None else f" with model.attn_implementation={shown(attention)} (null: transformers' default)"
        raise UserError(f"model.path={path!r}: {what}{how}: {described(error)}") from error
    if missing:
        raise UserError(f"model.path={path!r}: the weights lack {len(missing)} tensors, such as {min(missing)}")
    if tokenizer.pad_token is None and tokenizer.eos_token is None:
        raise UserError(f"model.path={path!r}: the tokenizer has neither an end nor a padding token")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    size = embedding_rows(model)
    if (pad_id := int(tokenizer.pad_token_id)) >= size:  # padding is masked, so any control token will do
        lacks = f"model.path={path!r}: the embedding has no row for the token {tokenizer.pad_token!r} (row {pad_id} of {size})"
        usable = [token for token in tokenizer.all_special_tokens if tokenizer.convert_tokens_to_ids(token) < size]
        if not usable:
            raise UserError(f"{lacks}; resize the embedding, or give the tokenizer another padding token")
        tokenizer.pad_token = tokenizer.eos_token if tokenizer.eos_token in usable else usable[0]
        logger.warning("%s; %r is used as padding instead", lacks, tokenizer.pad_token)
    return model, tokenizer


@contextmanager
def naming(setting: str) -> Iterator[None]:
    """Inside the block, make errors about the model refer to another setting instead of ``model.path``."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace("model.path", setting)) from error


def load_reference(settings: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Load the frozen model ``settings.reference``; raise `UserError` if its token IDs differ from those of ``tokenizer``."""
    update = {"path": settings.reference, "dtype": settings.reference_dtype or "auto"}
    with naming("model.reference"):
        return load_alike(settings.model_copy(update=update), tokenizer).eval().requires_grad_(False)


def load_alike(settings: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Load the model ``settings.path``; raise `UserError` if its token IDs differ from those of ``tokenizer``."""
    model, other = load_named(settings)
    ours, theirs = tokenizer.get_vocab(), other.get_vocab()
    for token, _ in sorted(ours.items() ^ theirs.items())[:1]:
        ids = f"the token {token!r} has id {theirs.get(token)} there and {ours.get(token)} in the model's"
        raise UserError(f"model.path={settings.path!r}: another tokenizer ({ids}); choose a model with the same tokenizer")
    return model


def save_model(folder: Path, model: PreTrainedModel, weights: Mapping[str, Tensor], tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the model with the given weights and its tokenizer so that ``from_pretrained`` can load them."""
    import torch

    with torch.device("meta"):
        skeleton = type(model)(model.config)  # has no weights or adapters
    skeleton.generation_config = model.generation_config
    with quiet():
        skeleton.save_pretrained(folder, state_dict=dict(weights))
        tokenizer.save_pretrained(folder)


def embedding_rows(model: PreTrainedModel) -> int:
    """Return the number of token IDs that the model can read."""
    return int(model.get_input_embeddings().weight.shape[0])


def context_length(model: PreTrainedModel) -> int | None:
    """Return the length in tokens of the longest row that the model can read, or None if there is no limit.

    With linear attention biases (ALiBi), there is no limit unless their length is fixed, even if the configuration states one.
    """
    import torch

    config, decoder = model.config.get_text_config(), model.get_decoder()
    has_biases = getattr(config, "alibi", False) or hasattr(decoder, "build_alibi_tensor")
    stated = (getattr(config, name, None) for name in (("max_seq_len",) if has_biases else _LENGTHS))
    limits = [value for value in stated if isinstance(value, int) and value > 0][:1]
    for name, module in decoder.named_modules():
        if isinstance(module, torch.nn.Embedding) and _POSITIONS.fullmatch(name.rpartition(".")[2]):
            padding, offset = module.padding_idx, int(getattr(module, "offset", 0))  # the first rows are not positions
            limits.append(module.num_embeddings - (offset if padding is None else padding + 1))
    return min(limits, default=None)


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return all token IDs that end a response, according to the generation config and the tokenizer."""
    ids = getattr(model.generation_config, "eos_token_id", None)
    both = [*(ids if isinstance(ids, list) else [ids]), tokenizer.eos_token_id]
    return frozenset(int(token) for token in both if token is not None)


def _from_pretrained(source: str, settings: ModelConfig, trust_remote_code: bool) -> tuple[Any, Any, set[str]]:
    """Load the model and its tokenizer. Also return the names of the weights that the checkpoint lacks."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from rlzoo.models.acceleration import prepare_cpu

    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    text_config = config.get_text_config()
    for name, value in text_config.to_dict().items():  # the layers copy the value when they are built, so set it before
        if ("dropout" in name or name.endswith("pdrop")) and type(value) in (int, float):
            setattr(text_config, name, 0.0)
    model, report = AutoModelForCausalLM.from_pretrained(
        source,
        config=config,
        dtype=settings.dtype,
        attn_implementation=settings.attn_implementation,
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
    )
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    prepare_cpu(model)
    # cuDNN's attention makes a plan for every new shape, which takes 1.5 ms per layer, but lengths differ from pass to pass
    torch.backends.cuda.enable_cudnn_sdp(False)
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    tokenizer.padding_side = "left"
    return model, tokenizer, set(report["missing_keys"])


@contextmanager
def quiet() -> Iterator[None]:
    """Inside the block, silence the warnings and progress bars of transformers and the hub."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging as transformers_logging

    has_bars = transformers_logging.is_progress_bar_enabled()
    verbosity, hub_verbosity = transformers_logging.get_verbosity(), hub_logging.get_verbosity()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            transformers_logging.disable_progress_bar()
            transformers_logging.set_verbosity(logging.ERROR)
            hub_logging.set_verbosity(logging.ERROR)
            yield
        finally:
            if has_bars:
                transformers_logging.enable_progress_bar()  # this enables the hub's progress bar too
            transformers_logging.set_verbosity(verbosity)
            hub_logging.set_verbosity(hub_verbosity)
