"""Writes a model to a new folder for ``vllm serve`` on this machine: ``python examples/write_served.py embedded served``.

vLLM's kernels for CPUs require attention heads that are at least 32 wide. Narrower heads are padded with zeros, which does not
change any logit.
"""

from __future__ import annotations

import argparse
import uuid
from pathlib import Path

from rlzoo.models.pretrained import load_pretrained
from rlzoo.rollout.vllm_model import cpu_head_size, head_size, padded_config, vllm_weights
from rlzoo.support.atomic import write_tensors


def write_served(path: str, folder: Path) -> None:
    """Write a model to a folder that does not exist yet. ``path`` is any valid value of ``model.path``."""
    from vllm.platforms import current_platform

    model, tokenizer = load_pretrained(path, "float32")
    size = cpu_head_size(model.config) if current_platform.is_cpu() else head_size(model.config)
    folder.mkdir(parents=True)
    config = padded_config(model.config, size)
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tensors = {name: tensor.clone() for name, tensor in vllm_weights(model.state_dict().items(), model.config, size)}
    write_tensors(folder / "model.safetensors", tensors, uuid.uuid4().hex, {"format": "pt"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a value of model.path")
    parser.add_argument("folder", type=Path, help="the new folder")
    options = parser.parse_args()
    write_served(options.model, options.folder)
