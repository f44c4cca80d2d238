"""Loads weights over HTTP in the workers of a vLLM server on another machine; see docs/how-to/vllm.md."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener


class FetchWeights:
    """Extends vLLM's workers: ``vllm serve MODEL --worker-extension-cls rlzoo.rollout.vllm_worker.FetchWeights``."""

    reload_weights: Any  # method of vLLM's worker

    def fetch_weights(self, url: str, timeout: float) -> None:
        """Download a safetensors file and load it. The trainer calls this method by name.

        Args:
            url: address of the file on the trainer's machine.
            timeout: maximum time between two parts of the file, in seconds.
        """
        with tempfile.TemporaryDirectory(prefix="rlzoo-weights-") as folder:
            opener = build_opener(ProxyHandler({}))  # use no proxy, because the trainer is on this network
            with opener.open(url, timeout=timeout) as answer, Path(folder, "model.safetensors").open("wb") as file:
                shutil.copyfileobj(answer, file, 2**20)
            self.reload_weights(weights_path=folder)  # this call rejects a truncated file
